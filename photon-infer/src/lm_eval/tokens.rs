//! From texts to rows of tokens, cut as lm-eval cuts them.

use photon_core::score::ScoreRow;
use photon_core::tokenizer::Tokenizer;

use super::RequestError;

/// The row of a continuation after a context, and the tokens of the context that it has no room for.
///
/// As lm-eval does for models of the `transformers` package: blanks at the end of the context go to the continuation; the
/// whole is encoded, and so is the context alone; as many tokens as that has are context, the rest is scored. So tokens
/// across the border are those of running text. With the byte tokenizer that is the border itself, blanks aside.
///
/// # Errors
///
/// Texts that the tokenizer refuses, a continuation without tokens, or with more than a row holds.
pub(super) fn pair_row(
    tokenizer: &Tokenizer,
    context: &str,
    continuation: &str,
    max_length: usize,
) -> Result<(ScoreRow, usize), RequestError> {
    let before = context.trim_end_matches(is_python_space);
    let whole = tokenizer.encode(format!("{context}{continuation}").as_bytes(), "context and continuation")?;
    let n_context = tokenizer.encode(before.as_bytes(), "context")?.len();
    match whole.len().saturating_sub(n_context) {
        0 if continuation.is_empty() => Err(RequestError::NoToken("it is empty")),
        0 => Err(RequestError::NoToken("it melts into the last token of the context")),
        found if found > max_length => Err(RequestError::TooLong { found, max_length }),
        _ => {
            let n_dropped = whole.len().saturating_sub(max_length);
            Ok((ScoreRow { token_ids: whole[n_dropped..].to_vec(), first: n_context - n_dropped }, n_dropped))
        }
    }
}

/// What Python's `str.rstrip` takes for blank: Unicode's white space and the four separators of ASCII.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Rows over a text of any length in which each token is scored once, and with as much context as can be.
///
/// With rows of 4 and tokens 0 to 8; `|` stands before the first that is scored:
///
/// ```text
/// |0 1 2 3     3|4 5 6     5 6|7 8
/// ```
///
/// The windows of lm-eval (`get_rolling_token_windows`), where each but the first has a token of context; the start vector
/// takes a place in every row, so it scores a token less than there.
pub(super) fn rolling_rows(token_ids: &[u32], max_length: usize) -> Vec<ScoreRow> {
    let mut rows = Vec::new();
    let mut n_scored = 0;
    while n_scored < token_ids.len() {
        let room = if n_scored == 0 { max_length } else { max_length - 1 };
        let end = (n_scored + room).min(token_ids.len());
        let start = end.saturating_sub(max_length);
        rows.push(ScoreRow { token_ids: token_ids[start..end].to_vec(), first: n_scored - start });
        n_scored = end;
    }
    rows
}

#[cfg(test)]
mod tests {
    use photon_core::tokenizer::train_bpe;

    use super::*;

    fn rows(n_tokens: u32, max_length: usize) -> Vec<(Vec<u32>, usize)> {
        let token_ids: Vec<u32> = (0..n_tokens).collect();
        rolling_rows(&token_ids, max_length).into_iter().map(|row| (row.token_ids, row.first)).collect()
    }

    #[test]
    fn example_of_the_rolling_rows() {
        assert_eq!(rows(9, 4), [(vec![0, 1, 2, 3], 0), (vec![3, 4, 5, 6], 1), (vec![5, 6, 7, 8], 2)]);
        assert!(rows(0, 4).is_empty());
    }

    #[test]
    fn every_token_is_scored_once_in_rows_that_are_full() {
        for max_length in [2, 3, 5, 8] {
            for n_tokens in 1..30 {
                let rows = rows(n_tokens, max_length);
                let scored = rows.iter().flat_map(|(row, first)| row[*first..].to_vec());
                assert!(scored.eq(0..n_tokens), "{n_tokens} by {max_length}");
                let full = max_length.min(n_tokens as usize);
                assert!(rows.iter().all(|(row, _)| row.len() == full), "{n_tokens} by {max_length}");
                assert!(rows[1..].iter().all(|(_, first)| *first >= 1), "{n_tokens} by {max_length}");
            }
        }
    }

    #[test]
    fn blanks_before_the_border_are_scored_with_what_follows() {
        let row = |context: &str, continuation: &str| {
            let (row, n_dropped) = pair_row(&Tokenizer::bytes(), context, continuation, 8).unwrap();
            let text = |ids: &[u32]| String::from_utf8(Tokenizer::bytes().decode(ids)).unwrap();
            (text(&row.token_ids[..row.first]), text(&row.token_ids[row.first..]), n_dropped)
        };
        let expected = |context: &str, scored: &str, n_dropped| (context.to_owned(), scored.to_owned(), n_dropped);
        assert_eq!(row("a ", "b"), expected("a", " b", 0));
        assert_eq!(row("a\u{a0}\x1c\n", "b"), expected("a", "\u{a0}\x1c\nb", 0));
        assert_eq!(row(" ", "b"), expected("", " b", 0));
        assert_eq!(row("", "b"), expected("", "b", 0));
        assert_eq!(row("012345678", "ab"), expected("345678", "ab", 3));
        assert_eq!(row("012", "abcdefgh"), expected("", "abcdefgh", 3));
        let error = |context, continuation| pair_row(&Tokenizer::bytes(), context, continuation, 8).unwrap_err();
        assert!(error("a", "").to_string().contains("it is empty"));
        assert!(error("a", "123456789").to_string().contains("has 9 tokens, a row holds 8"));
    }

    #[test]
    fn tokens_across_the_border_are_those_of_running_text() {
        let text = "the whale the whales ".repeat(30);
        let bpe = train_bpe([text].into_iter(), 290).unwrap();
        let whole = bpe.encode(b"the whale the whales", "t").unwrap();
        let (row, _) = pair_row(&bpe, "the whale ", "the whales", 64).unwrap();
        assert_eq!(row.token_ids, whole);
        assert_eq!(bpe.decode(&whole[row.first..]), b" the whales");
        // Alone the continuation would begin with another token.
        assert_ne!(bpe.encode(b"the whales", "t").unwrap(), whole[row.first..]);
        // "whale" and "s" are one token together, so the context alone has as many as the whole.
        let error = pair_row(&bpe, "the whale", "s", 64).unwrap_err().to_string();
        assert!(error.contains("melts into"), "{error}");
    }
}
