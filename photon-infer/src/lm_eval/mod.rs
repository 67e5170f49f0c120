//! Answers to the requests of EleutherAI's lm-evaluation-harness (`lm-eval`), as lines of JSON.
//!
//! ```text
//! request   a line -> what is asked for, checked
//! tokens    texts -> rows of tokens: the border of context and continuation, windows over long texts
//! answer    many requests at once -> answers, in order
//! ```
//!
//! A line is one object, and so is its answer; `id` may be any JSON and comes back:
//!
//! ```text
//! {"request": "loglikelihood", "context": "Call me", "continuation": " Ishmael", "id": 7}
//! {"id": 7, "logprob": -6.25, "is_greedy": false, "tokens": 8, "dropped_tokens": 0}
//! {"request": "loglikelihood_rolling", "text": "Call me Ishmael."}
//! {"logprob": -31.5, "tokens": 16}
//! {"request": "generate_until", "context": "Call me", "until": ["\n"], "max_gen_toks": 32}
//! {"text": " a sailor.", "finish_reason": "stop", "tokens": 11, "dropped_tokens": 0}
//! {"request": "loglikelihod"}
//! {"line": 4, "error": "unknown variant `loglikelihod`, ..."}
//! ```
//!
//! An empty line asks for the answers to all lines before it; so does the end of the input, and a good many lines.
//!
//! # What the numbers mean
//!
//! Log-probabilities are natural and come from the training forward, f32, summed in f64. `is_greedy` says whether each
//! token is the likeliest, the lowest id among equals. A row holds at most `max_length` tokens, as in training, and begins
//! with the learned start vector: that stands where other models put a beginning-of-text token, so an empty context needs
//! none, and a `max_length` of 512 means 512 predictions. Contexts that are too long lose their beginning.

mod answer;
mod request;
mod tokens;

use std::io::{BufRead, Write};

use photon_core::checkpoint::Checkpoint;
use photon_core::infer_config::InferPlan;
use serde_json::{Map, Value};

pub use answer::{Answer, answer};
pub use request::{Request, RequestError};

/// Lines that are answered together, at most.
const MAX_GROUP_LINES: usize = 1024;

/// How requests are answered.
#[derive(Clone, Debug, PartialEq)]
pub struct LmEvalConfig {
    /// Tokens of a row, at least 2.
    pub max_length: usize,
    /// Rows that generate side by side, at least 1.
    pub batch_size: usize,
    /// Decides the choices where a temperature is asked for, with the number of the request.
    pub seed: u64,
    /// How caches store and keep entries while generating; made for the model.
    pub plan: InferPlan,
}

/// A line that was read.
struct Line {
    number: usize,
    id: Option<Value>,
    request: Result<Request, RequestError>,
}

/// Answers every line of `input`, in order; `progress` is told of requests done in a group, and all of it.
///
/// # Errors
///
/// When reading or writing fails; what is wrong with a request is its answer.
pub fn serve(
    checkpoint: &Checkpoint,
    config: &LmEvalConfig,
    mut input: impl BufRead,
    mut output: impl Write,
    progress: &dyn Fn(usize, usize),
) -> std::io::Result<()> {
    let mut number = 0;
    loop {
        let (lines, is_end) = read_group(&mut input, &mut number)?;
        let requests: Vec<(usize, &Request)> =
            lines.iter().filter_map(|line| Some((line.number, line.request.as_ref().ok()?))).collect();
        let mut answers = answer(checkpoint, config, &requests, progress).into_iter();
        for line in &lines {
            let answer = match &line.request {
                Ok(_) => answers.next().expect("every request has an answer"),
                Err(error) => Answer::Error { line: line.number, error: error.to_string() },
            };
            writeln!(output, "{}", with_id(line.id.as_ref(), &answer)?)?;
        }
        output.flush()?;
        if is_end {
            return Ok(());
        }
    }
}

/// Lines up to an empty one, and whether the input has ended.
fn read_group(input: &mut impl BufRead, number: &mut usize) -> std::io::Result<(Vec<Line>, bool)> {
    let mut lines = Vec::new();
    let mut bytes = Vec::new();
    while lines.len() < MAX_GROUP_LINES {
        bytes.clear();
        if input.read_until(b'\n', &mut bytes)? == 0 {
            return Ok((lines, true));
        }
        *number += 1;
        if bytes.trim_ascii().is_empty() {
            break;
        }
        let (id, request) = Request::parse(&bytes);
        lines.push(Line { number: *number, id, request });
    }
    Ok((lines, false))
}

fn with_id(id: Option<&Value>, answer: &Answer) -> serde_json::Result<String> {
    let mut object = Map::new();
    object.extend(id.map(|id| ("id".to_owned(), id.clone())));
    if let Value::Object(answer) = serde_json::to_value(answer)? {
        object.extend(answer);
    }
    serde_json::to_string(&object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_end_at_empty_lines_and_lines_are_counted() {
        let line = r#"{"request": "loglikelihood_rolling", "text": ""}"#;
        let text = format!("{line}\n\n  \r\n{line}\n{line}");
        let (mut input, mut number) = (text.as_bytes(), 0);
        let mut next = || {
            let (lines, is_end) = read_group(&mut input, &mut number).unwrap();
            (lines.iter().map(|line| line.number).collect::<Vec<_>>(), is_end)
        };
        assert_eq!([next(), next(), next()], [(vec![1], false), (vec![], false), (vec![4, 5], true)]);
        let many = format!("{line}\n").repeat(MAX_GROUP_LINES + 1);
        let (mut input, mut number) = (many.as_bytes(), 0);
        let mut len = || read_group(&mut input, &mut number).unwrap().0.len();
        assert_eq!([len(), len()], [MAX_GROUP_LINES, 1]);
    }
}
