//! Documents that share a row are computed as each would be alone: values, gradients, evaluations.

use burn::tensor::{Device, Tensor};
use photon_core::documents::Documents;
use photon_core::loss::{self, Objective};
use photon_core::model::Model;
use photon_train::data::{TokenStore, tokenise_texts};
use photon_train::eval::evaluate;
use photon_train::replicas::Replicas;

use crate::gradients::gradients;
use crate::support::{
    Case, PICKED, STRIDED, VOCAB_SIZE, flat_case, flat_cases, forward, ids, logits_of, max_difference, parse,
    photon_case, photon_cases, random_rows, shaken,
};

/// Every kind of attention, and a flat model with the learned sink.
fn cases() -> Vec<Case> {
    let with_sink = "{ window = { units = 3 } }\nsink = true";
    photon_cases().into_iter().chain(flat_cases()).chain([flat_case(with_sink)]).collect()
}

/// A few of them, for what takes longer.
fn few_cases() -> Vec<Case> {
    vec![
        photon_case(3, "{ window = { units = 2 } }", "{ stream = { window = 5 } }"),
        photon_case(2, "\"block\"", "{ lookback = { chunks = 1 } }"),
        photon_case(2, PICKED, "\"chunk\""),
        photon_case(1, STRIDED, "{ stream = { window = 5 } }"),
        flat_case("\"full\""),
        flat_case(STRIDED),
        flat_case(PICKED),
    ]
}

/// Rows of several documents, long and as short as may be, and of one; the last ends in the middle of a unit.
fn rows_of(case: &Case) -> (Vec<Vec<u32>>, Documents) {
    let chunk = case.config.meta_chunk_tokens();
    // Long enough for sparse attention to leave something out, and no multiple of its blocks where that may be.
    let unit = 9_usize.next_multiple_of(chunk);
    let starts = vec![vec![0, unit, unit + chunk, 4 * unit], vec![0, 2 * unit], vec![0]];
    (random_rows(3, 5 * unit - 1, 31), Documents::new(starts))
}

/// The ranges of all documents, with their rows.
fn all_documents(rows: &[Vec<u32>], documents: &Documents) -> Vec<(usize, std::ops::Range<usize>)> {
    (0..rows.len()).flat_map(|row| documents.of_row(row, rows[row].len()).map(move |range| (row, range))).collect()
}

/// Logits of the training forward with documents kept apart: by row, by position.
fn forward_apart(model: &Model, rows: &[Vec<u32>], documents: &Documents) -> Vec<Vec<Vec<f32>>> {
    let hidden = model.hidden_apart(ids(rows, &model.device()), documents).tokens;
    logits_of(model.head().forward(hidden))
}

#[test]
fn a_row_of_documents_is_each_document_alone() {
    for case in cases() {
        let model = shaken(&case.config, &Device::flex());
        let (rows, documents) = rows_of(&case);
        let together = forward_apart(&model, &rows, &documents);
        for (row, range) in all_documents(&rows, &documents) {
            let alone = forward(&model, &[rows[row][range.clone()].to_vec()]).remove(0);
            for (position, alone) in range.clone().zip(&alone) {
                let difference = max_difference(&together[row][position], alone);
                // Matrix products of other sizes sum in another order.
                let place = format!("row {row}, position {position} of {range:?}");
                assert!(difference < 1e-5, "{}: {place}: {difference}", case.name);
            }
        }
    }
}

#[test]
fn a_row_of_one_document_is_what_it_was() {
    for case in few_cases() {
        let model = shaken(&case.config, &Device::flex());
        let (rows, _) = rows_of(&case);
        assert_eq!(forward_apart(&model, &rows, &Documents::whole_rows(3)), forward(&model, &rows), "{}", case.name);
    }
}

#[test]
fn no_token_changes_the_logits_of_another_document() {
    for case in cases() {
        let model = shaken(&case.config, &Device::flex());
        let (rows, documents) = rows_of(&case);
        let (tokens, documents) = (rows[0].clone(), documents.rows(0..1));
        let ranges: Vec<_> = documents.of_row(0, tokens.len()).collect();
        // All perturbations in one batch: rows do not touch each other.
        let mut rows = vec![tokens.clone()];
        for p in 0..tokens.len() {
            let mut changed = tokens.clone();
            changed[p] = (changed[p] + 1) % VOCAB_SIZE as u32;
            rows.push(changed);
        }
        let starts: Vec<usize> = ranges.iter().map(|range| range.start).collect();
        let logits = forward_apart(&model, &rows, &Documents::new(vec![starts; rows.len()]));
        let bits = |line: &[f32]| line.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for p in 0..tokens.len() {
            let own = ranges.iter().find(|range| range.contains(&p)).unwrap();
            let moved: Vec<usize> =
                (0..tokens.len()).filter(|&i| bits(&logits[p + 1][i]) != bits(&logits[0][i])).collect();
            assert!(moved.iter().all(|i| own.contains(i)), "{}: token {p} of {own:?} moves {moved:?}", case.name);
            assert!(p + 1 == own.end || !moved.is_empty(), "{}: token {p} moves nothing", case.name);
        }
    }
}

#[test]
fn no_gradient_flows_into_another_document() {
    for case in few_cases() {
        let chunk = case.config.meta_chunk_tokens();
        let unit = 10_usize.next_multiple_of(chunk);
        // The documents have no token in common.
        let first_id = |row: usize, position: usize| if (position < unit) == (row == 0) { 0 } else { 6 };
        let id = |row: usize, position: usize| first_id(row, position) + (position * 5 % 6) as u32;
        let rows: Vec<Vec<u32>> = (0..2).map(|row| (0..2 * unit).map(|position| id(row, position)).collect()).collect();
        let documents = Documents::new(vec![vec![0, unit]; 2]);
        // What is predicted are the second document of the first row and the first of the second, of the same tokens.
        let is_real: Vec<bool> = (0..4 * unit).map(|place| (place % (2 * unit) < unit) != (place < 2 * unit)).collect();
        for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
            let model = shaken(&case.config, &device);
            let objective = Objective::of_places(&case.config, 0.3, &is_real, 2);
            let loss = objective.loss_apart(&model, ids(&rows, &device), &is_real, &documents).total;
            let found = gradients(&model, loss);
            let tables: Vec<_> = found.iter().filter(|(path, _)| path.contains("embedding")).collect();
            assert!(!tables.is_empty());
            for (path, gradient) in tables {
                let by_id: Vec<&[f32]> = gradient.chunks(gradient.len() / VOCAB_SIZE).collect();
                assert!(by_id[..6].concat().iter().all(|&g| g == 0.0), "{}: {path}", case.name);
                assert!(by_id[6..12].concat().iter().any(|&g| g != 0.0), "{}: {path} has no gradient", case.name);
            }
        }
    }
}

#[test]
fn the_loss_of_a_row_and_its_gradients_are_those_of_its_documents() {
    for case in few_cases() {
        let (rows, documents) = rows_of(&case);
        let row_len = rows[0].len();
        // Some places are padding, as at the end of a document.
        let is_real: Vec<bool> = (0..3 * row_len).map(|place| place % 7 != 6).collect();
        let objective = Objective::of_places(&case.config, 0.3, &is_real, 3).with_z_loss(0.01);
        for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
            let model = shaken(&case.config, &device);
            let loss = |rows: &[Vec<u32>], is_real: &[bool], documents: &Documents| {
                let total = objective.loss_apart(&model, ids(rows, &device), is_real, documents).total;
                (total.clone().into_scalar::<f32>(), gradients(&model, total))
            };
            let (together, together_gradients) = loss(&rows, &is_real, &documents);
            let mut sum = 0.0;
            let mut sums: Vec<Vec<f32>> = together_gradients.iter().map(|(_, g)| vec![0.0; g.len()]).collect();
            for (row, range) in all_documents(&rows, &documents) {
                let is_real = &is_real[row * row_len..][range.clone()];
                let (alone, gradients) = loss(&[rows[row][range].to_vec()], is_real, &Documents::whole_rows(1));
                sum += alone;
                for (sum, (_, gradient)) in sums.iter_mut().zip(gradients) {
                    sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
                }
            }
            assert!((together - sum).abs() <= 1e-5 * sum.abs(), "{}: {together}, alone {sum}", case.name);
            for ((path, gradient), sum) in together_gradients.iter().zip(&sums) {
                let size = sum.iter().fold(0.0f32, |size, g| size.max(g.abs()));
                let difference = max_difference(gradient, sum);
                assert!(difference <= 2e-5 * size, "{}: {path}: {difference} of {size}", case.name);
            }
        }
    }
}

#[test]
fn an_evaluation_with_a_mask_is_the_mean_over_documents_alone() {
    let folder = tempfile::tempdir().unwrap();
    let texts = ["Call me Ishmael.", "I", "Some years ago", "never mind how long precisely - having little money"];
    let lines: String = texts.map(|text| serde_json::json!({ "text": text }).to_string() + "\n").concat();
    let path = folder.path().join("lines.jsonl");
    std::fs::write(&path, lines).unwrap();
    let tokenizer = photon_core::tokenizer::Tokenizer::bytes();
    let cache = folder.path().join("tokens");
    let paths = [path.display().to_string()];
    let (store, _) = tokenise_texts(&paths, "text", &tokenizer, &cache, &|_| {}).unwrap();
    for config in [
        "architecture = \"photon\"\nvocab_size = 257\nd_model = 8\n\
         [[levels]]\nchunk_len = 2\nd_model = 8\nencoder = { n_layers = 1, n_heads = 2, d_ff = 8 }\n\
         converter = { prefix_len = 1 }\n\
         decoder = { n_layers = 1, n_heads = 2, d_ff = 8, attention = { stream = { window = 20 } } }\n\
         [[levels]]\nchunk_len = 2\nd_model = 8\nencoder = { n_layers = 1, n_heads = 2, d_ff = 8 }\n\
         converter = { prefix_len = 1 }\ndecoder = { n_layers = 1, n_heads = 2, d_ff = 8 }\n",
        "architecture = \"flat\"\nvocab_size = 257\nd_model = 8\n[stack]\nn_layers = 2\nn_heads = 2\nd_ff = 8\n",
    ]
    .map(parse)
    {
        let model = shaken(&config, &Device::flex());
        let laid = match config.meta_chunk_tokens() {
            // In a stream documents start anywhere.
            1 => store.clone(),
            chunk_tokens => store.clone().aligned(chunk_tokens),
        };
        let evaluated = |laid: &TokenStore| {
            let replicas = Replicas::new(1).unwrap();
            evaluate(&model, &tokenizer, laid, 128, usize::MAX, &replicas).nats_per_token
        };
        let nats: Vec<f32> = texts
            .iter()
            .flat_map(|text| {
                let row: Vec<u32> = text.bytes().map(u32::from).chain([256]).collect();
                let n = row.len();
                let ids = ids(&[row], &model.device());
                let hidden = model.hidden(ids.clone()).tokens.reshape([n, 8]);
                let nats: Tensor<1> = loss::token_nats(hidden, &model.head().weights(), ids.reshape([n]));
                nats.try_into_vec_as::<f32>().unwrap()
            })
            .collect();
        let alone = f64::from(nats.iter().sum::<f32>()) / nats.len() as f64;
        let masked = evaluated(&laid.clone().with_document_mask());
        assert!((masked - alone).abs() < 1e-5, "{masked}, alone {alone}");
        assert!((evaluated(&laid) - alone).abs() > 1e-3, "without a mask documents see each other");
    }
}
