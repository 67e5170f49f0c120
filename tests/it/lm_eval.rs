//! What lm-eval asks for is answered with the numbers of the training forward, and with what generation writes.

use burn::tensor::Device;
use photon_core::checkpoint::Checkpoint;
use photon_core::infer_config::InferConfig;
use photon_core::tokenizer::Tokenizer;
use photon_infer::lm_eval::{LmEvalConfig, serve};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::programs::{assert_says, complaint_of, json_of, photon_infer, tiny_checkpoint};
use crate::support::{flat_case, forward, photon_case, shaken_bytes};

/// Tokens of a row.
const MAX_LENGTH: usize = 24;

/// f32 sums in another order, over a row.
const TOLERANCE: f64 = 1e-3;

fn checkpoints() -> [Checkpoint; 4] {
    let configs = [
        flat_case("\"full\"").config,
        photon_case(1, "\"full\"", "\"chunk\"").config,
        photon_case(2, "\"block\"", "{ stream = { window = 5 } }").config,
        photon_case(3, "{ window = { units = 2 } }", "{ lookback = { chunks = 1 } }").config,
    ];
    configs.map(|config| Checkpoint { model: shaken_bytes(config, &Device::flex()), tokenizer: Tokenizer::bytes() })
}

fn ask_with(checkpoint: &Checkpoint, lines: &str, change: impl FnOnce(&mut LmEvalConfig)) -> Vec<Value> {
    let plan = InferConfig::default().plan(&checkpoint.model.config()).unwrap();
    let mut config = LmEvalConfig { max_length: MAX_LENGTH, batch_size: 3, seed: 5, plan };
    change(&mut config);
    let mut output = Vec::new();
    serve(checkpoint, &config, lines.as_bytes(), &mut output, &|_, _| {}).unwrap();
    let output = String::from_utf8(output).unwrap();
    output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ask(checkpoint: &Checkpoint, requests: &[Value]) -> Vec<Value> {
    let lines: String = requests.iter().map(|request| format!("{request}\n")).collect();
    let answers = ask_with(checkpoint, &lines, |_| {});
    assert_eq!(answers.len(), requests.len());
    answers
}

/// Texts of letters, of unequal lengths.
fn texts(n: usize, seed: u64) -> Vec<String> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| (0..rng.random_range(1..30)).map(|_| char::from(rng.random_range(b'a'..=b'z'))).collect()).collect()
}

/// Log-probabilities of the tokens of a row from `first` on, and whether all are the likeliest, by the training forward.
fn by_forward(checkpoint: &Checkpoint, row: &[u8], first: usize) -> (f64, bool) {
    let ids: Vec<u32> = row.iter().copied().map(u32::from).collect();
    let logits = forward(&checkpoint.model, std::slice::from_ref(&ids)).remove(0);
    let of = |place: usize| {
        let (logits, id) = (&logits[place], ids[place] as usize);
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
        (f64::from(logits[id] - largest) - sum.ln(), logits[id] == largest)
    };
    (first..row.len()).map(of).fold((0.0, true), |(sum, all), (logprob, is_best)| (sum + logprob, all && is_best))
}

/// A letter that the forward finds likeliest after a text, if it is one.
fn greedy_letter(checkpoint: &Checkpoint, text: &str) -> Option<char> {
    let mut ids: Vec<u32> = text.bytes().map(u32::from).collect();
    ids.push(0);
    let logits = forward(&checkpoint.model, &[ids]).remove(0).pop().unwrap();
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let likeliest = logits.iter().position(|&logit| logit == largest).unwrap();
    u8::try_from(likeliest).ok().filter(u8::is_ascii_graphic).map(char::from)
}

#[test]
fn sums_and_greedy_flags_are_those_of_the_training_forward() {
    let (mut n_greedy, mut n_dropping) = (0, 0);
    for checkpoint in &checkpoints() {
        let mut pairs: Vec<(String, String)> = texts(12, 1).into_iter().zip(texts(12, 2)).collect();
        pairs.iter_mut().for_each(|(_, continuation)| continuation.truncate(20));
        pairs.push((String::new(), "from nothing".to_owned()));
        for text in texts(40, 3).into_iter().filter(|text| text.len() < MAX_LENGTH) {
            pairs.extend(greedy_letter(checkpoint, &text).map(|letter| (text, letter.to_string())));
        }
        let request = |(index, (context, continuation)): (usize, &(String, String))| json!({ "request": "loglikelihood", "context": context, "continuation": continuation, "id": index });
        let requests: Vec<Value> = pairs.iter().enumerate().map(request).collect();
        for (index, ((context, continuation), answer)) in pairs.iter().zip(ask(checkpoint, &requests)).enumerate() {
            let row = format!("{context}{continuation}");
            let n_dropped = row.len().saturating_sub(MAX_LENGTH);
            let first = context.len() - n_dropped;
            let (logprob, is_greedy) = by_forward(checkpoint, &row.as_bytes()[n_dropped..], first);
            assert_eq!(answer["id"], index, "answers keep the order");
            assert!((answer["logprob"].as_f64().unwrap() - logprob).abs() < TOLERANCE, "{answer} {logprob}");
            assert_eq!(answer["is_greedy"], is_greedy, "{answer}");
            assert_eq!((&answer["tokens"], &answer["dropped_tokens"]), (&continuation.len().into(), &n_dropped.into()));
            n_greedy += usize::from(is_greedy);
            n_dropping += usize::from(n_dropped > 0);
        }
    }
    assert!(n_greedy >= 10 && n_dropping >= 10, "{n_greedy} greedy continuations, {n_dropping} long contexts");
}

#[test]
fn long_texts_are_scored_in_windows_each_token_once() {
    for checkpoint in &checkpoints() {
        let texts: Vec<String> = [0, 1, MAX_LENGTH, MAX_LENGTH + 1, 2 * MAX_LENGTH + 7]
            .map(|n| "whale ocean ".repeat(9)[..n].to_owned())
            .into();
        let requests: Vec<Value> =
            texts.iter().map(|text| json!({ "request": "loglikelihood_rolling", "text": text })).collect();
        let answers = ask(checkpoint, &requests);
        let logprobs: Vec<f64> = answers.iter().map(|answer| answer["logprob"].as_f64().unwrap()).collect();
        let row = |text: &str, tokens: std::ops::Range<usize>, first| {
            by_forward(checkpoint, &text.as_bytes()[tokens], first).0
        };
        let (l, long) = (MAX_LENGTH, texts[4].as_str());
        let expected = [
            0.0,
            row(&texts[1], 0..1, 0),
            row(&texts[2], 0..l, 0),
            row(&texts[3], 0..l, 0) + row(&texts[3], 1..l + 1, l - 1),
            row(long, 0..l, 0) + row(long, l - 1..2 * l - 1, 1) + row(long, l + 7..2 * l + 7, l - 8),
        ];
        for ((found, expected), (answer, text)) in logprobs.iter().zip(expected).zip(answers.iter().zip(&texts)) {
            assert!((found - expected).abs() < TOLERANCE, "{answer} {expected}");
            assert_eq!(answer["tokens"], text.len());
        }
    }
}

#[test]
fn continuations_are_those_of_generation_whatever_the_batch() {
    for checkpoint in &checkpoints() {
        let mut requests: Vec<Value> = texts(5, 4)
            .into_iter()
            .map(|text| json!({ "request": "generate_until", "context": text, "max_gen_toks": 6 }))
            .collect();
        // Settings alternate, so that equal ones are not neighbours.
        for (index, request) in requests.iter_mut().enumerate().filter(|(index, _)| index % 2 == 1) {
            request["temperature"] = json!(1.5);
            request["top_k"] = json!(20 + index);
        }
        requests.push(json!({ "request": "generate_until", "context": "" }));
        let lines: String = requests.iter().map(|request| format!("{request}\n")).collect();
        let together = ask_with(checkpoint, &lines, |_| {});
        assert_eq!(together, ask_with(checkpoint, &lines, |config| config.batch_size = 1));
        for (request, answer) in requests.iter().zip(&together) {
            let context = request["context"].as_str().unwrap();
            let dropped = context.len().saturating_sub(MAX_LENGTH - 6);
            let n = if request["max_gen_toks"].is_null() { MAX_LENGTH / 2 } else { 6 };
            if request["max_gen_toks"].is_u64() {
                assert_eq!(answer["dropped_tokens"], dropped);
            }
            assert!(answer["finish_reason"] != "length" || answer["tokens"] == n, "{answer}");
            if request["temperature"].is_null() {
                // The likeliest token after each prefix of row and text, as far as it is text.
                let mut row = context[dropped.min(context.len())..].to_owned();
                for letter in answer["text"].as_str().unwrap().chars().take_while(char::is_ascii_graphic) {
                    assert_eq!(greedy_letter(checkpoint, &row), Some(letter), "{answer}");
                    row.push(letter);
                }
            }
        }
        // A text that ends it is not part of it.
        let whole = together[0]["text"].as_str().unwrap();
        if let Some(stop) = whole.chars().nth(1).filter(char::is_ascii) {
            let mut stopped = requests[0].clone();
            stopped["until"] = json!([stop.to_string()]);
            let answer = ask(checkpoint, &[stopped]).remove(0);
            assert_eq!((answer["text"].as_str(), &answer["finish_reason"]), (whole.split(stop).next(), &"stop".into()));
        }
    }
}

#[test]
fn what_is_wrong_with_a_line_is_its_answer_and_the_others_have_theirs() {
    let checkpoint = &checkpoints()[0];
    let good = r#"{"request": "loglikelihood_rolling", "text": "ab"}"#;
    let long = "x".repeat(MAX_LENGTH + 1);
    let lines = [
        good.to_owned(),
        "not json".to_owned(),
        String::new(),
        r#"{"request": "loglikelihood", "context": "a", "continuation": "", "id": "empty"}"#.to_owned(),
        json!({ "request": "loglikelihood", "context": "a", "continuation": long }).to_string(),
        json!({ "request": "generate_until", "context": "a", "max_gen_toks": MAX_LENGTH }).to_string(),
        json!({ "request": "generate_until", "context": "a", "max_gen_toks": 0 }).to_string(),
        json!({ "request": "generate_until", "context": "a", "top_p": 2.0 }).to_string(),
        good.to_owned(),
    ];
    let answers = ask_with(checkpoint, &lines.join("\n"), |_| {});
    let expected = [
        None,
        Some((2, "expected ident")),
        Some((4, "it is empty")),
        Some((5, "the continuation has 25 tokens, a row holds 24")),
        Some((6, "max_gen_toks = 24: must be from 1 to less than the 24 tokens")),
        Some((7, "max_gen_toks = 0")),
        Some((8, "top_p = 2")),
        None,
    ];
    assert_eq!(answers.len(), expected.len());
    for (answer, expected) in answers.iter().zip(expected) {
        match expected {
            None => assert_eq!((&answer["logprob"], answer["tokens"].as_u64()), (&answers[0]["logprob"], Some(2))),
            Some((line, said)) => {
                assert_eq!(answer["line"], line, "{answer}");
                assert_says(answer["error"].as_str().unwrap(), &[said]);
            }
        }
    }
    assert_eq!(answers[2]["id"], "empty");
}

#[test]
fn the_program_answers_on_stdout_with_the_rows_of_its_run() {
    let command = |args: &[&str]| {
        let mut command = photon_infer(["lm-eval", "--device", "cpu", "--model"]);
        command.arg(tiny_checkpoint()).args(args);
        let context = "x".repeat(40);
        command.write_stdin(json!({ "request": "loglikelihood", "context": context, "continuation": "y" }).to_string());
        command
    };
    // The run has rows of 32 tokens.
    assert_eq!(json_of(command(&[]))[0]["dropped_tokens"], 9);
    assert_eq!(json_of(command(&["--max-length", "41"]))[0]["dropped_tokens"], 0);
    assert_says(&complaint_of(command(&["--max-length", "1"])), &["--max-length 1: must be at least 2"]);
}
