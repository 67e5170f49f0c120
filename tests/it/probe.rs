//! Probes against models whose use of context is known: by the reach of their attention, or by their weights.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use photon_core::config::ModelConfig;
use photon_core::model::Model;
use photon_core::tokenizer::Tokenizer;
use photon_train::data::{TokenStore, tokenise_texts};
use photon_train::parameters::ParameterPath;
use photon_train::probe::context::context;
use photon_train::probe::copy::copy;
use photon_train::probe::length::length;
use photon_train::probe::{ProbeError, Setup};
use photon_train::replicas::Replicas;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use crate::programs::{assert_says, complaint_of, json_of, photon_train, some_text, stdout_of, tiny_checkpoint};
use crate::support::{parse, photon_case, shaken_bytes};

/// Letters that the texts are drawn of.
const N_LETTERS: usize = 8;

/// A text of random letters, by bytes.
fn letters(n_tokens: usize, folder: &tempfile::TempDir) -> TokenStore {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    // The end of the document is a token too.
    let text: Vec<u8> = (1..n_tokens).map(|_| b'a' + rng.random_range(0..N_LETTERS as u8)).collect();
    let path = folder.path().join("letters.txt");
    std::fs::write(&path, text).unwrap();
    let paths = [path.display().to_string()];
    tokenise_texts(&paths, "text", &Tokenizer::bytes(), &folder.path().join("tokens"), &|_| {}).unwrap().0
}

/// Calls `check` with a setup over a text of random letters.
fn with_setup(model: &Model, seq_len: usize, n_tokens: usize, check: impl FnOnce(&Setup)) {
    let folder = tempfile::tempdir().unwrap();
    let replicas = Replicas::new(2).unwrap();
    check(&Setup {
        model,
        tokenizer: &Tokenizer::bytes(),
        store: &letters(n_tokens, &folder),
        seq_len,
        n_windows: 6,
        seed: 1,
        replicas: &replicas,
        progress: &|_, _| {},
    });
}

fn windowed_flat() -> ModelConfig {
    parse(
        "architecture = \"flat\"\nvocab_size = 13\nd_model = 8\n\
         [stack]\nn_layers = 2\nn_heads = 2\nd_ff = 12\nattention = { window = { units = 3 } }\n",
    )
}

/// Models, and how many tokens before a border of chunks are seen from behind it.
fn bounded() -> [(Model, usize); 4] {
    let bytes = |config| shaken_bytes(config, &Device::flex());
    let photon = |n_levels, decoder| photon_case(n_levels, "{ window = { units = 2 } }", decoder).config;
    [
        // Each of two layers looks two positions back, and a position holds the token before it.
        (bytes(windowed_flat()), 5),
        // Three latents of two tokens.
        (bytes(photon(1, "\"chunk\"")), 6),
        // The newest latent but one conditions the chunk before, which is looked back to.
        (bytes(photon(1, "{ lookback = { chunks = 1 } }")), 10),
        // Three latents of three units, the oldest of which looks two units further back; a unit is two tokens.
        (bytes(photon(2, "\"chunk\"")), 22),
    ]
}

#[test]
fn what_lies_beyond_the_reach_of_attention_is_worth_exactly_nothing() {
    for (model, reach) in bounded() {
        with_setup(&model, 96, 1200, |setup| {
            let outcome = context(setup, &[reach + 20, reach, reach - 1, 1]).unwrap();
            assert_eq!(outcome.n_windows, 6);
            let lost = outcome.depths.iter().map(|depth| depth.lost_nats_per_byte);
            let [far, at, within, near] = lost.collect::<Vec<_>>().try_into().unwrap();
            for nothing in [far, at] {
                assert_eq!((nothing.mean, nothing.standard_error), (0.0, Some(0.0)), "reach {reach}: {nothing:?}");
            }
            assert!(within.mean != 0.0 && within.standard_error > Some(0.0), "reach {reach}: {within:?}");
            assert!(near.mean.abs() > 1e-3, "reach {reach}: {near:?}");
        });
    }
}

#[test]
fn a_plant_beyond_the_reach_of_attention_gains_exactly_nothing() {
    let span = 6;
    for (model, reach) in bounded() {
        with_setup(&model, 96, 1200, |setup| {
            // A span may begin within a meta-chunk, and what is seen before that begins at its border.
            let far = span + reach + model.config().meta_chunk_tokens();
            let outcome = copy(setup, &[span], &[far, span]).unwrap();
            let [far, near] = [0, 1].map(|index| outcome[index].gained_nats_per_byte);
            assert_eq!((far.mean, far.standard_error), (0.0, Some(0.0)), "reach {reach}");
            assert!(near.mean.abs() > 1e-3, "reach {reach}: {near:?}");
        });
    }
}

#[test]
fn positions_that_attention_does_not_feel_cost_nothing_at_any_length() {
    for (model, _) in bounded() {
        with_setup(&model, 48, 1200, |setup| {
            let outcome = length(setup, &[8, 1, 2, 2]).unwrap();
            assert_eq!(outcome.lengths.iter().map(|line| line.factor).collect::<Vec<_>>(), [1, 2, 8]);
            // Rotations are relative up to rounding.
            assert!(outcome.lengths.iter().all(|line| line.change_bits_per_byte.mean.abs() < 1e-4), "{outcome:?}");
        });
    }
    let unbounded = shaken_bytes(photon_case(2, "\"full\"", "\"chunk\"").config, &Device::flex());
    with_setup(&unbounded, 48, 1200, |setup| {
        let outcome = length(setup, &[1, 8]).unwrap();
        assert!(outcome.lengths[1].change_bits_per_byte.mean.abs() > 1e-3, "{outcome:?}");
    });
}

/// A flat model that predicts the letter that stood `distance` tokens before: its only head looks there whatever the
/// letters are, and the output is what is found.
fn copier(distance: usize) -> Model {
    const D: usize = 32;
    const ONE: usize = N_LETTERS;
    const FOUND: usize = 2 * N_LETTERS;
    const THETA: f64 = 100.0;
    struct Build {
        path: ParameterPath,
        offset: f64,
    }
    impl Build {
        fn value(&self, row: usize, column: usize) -> f64 {
            let letter_of =
                |token_id: usize| token_id.checked_sub(usize::from(b'a')).filter(|&letter| letter < N_LETTERS);
            // Every embedding holds a one, by which queries and keys are the same for all letters.
            let one_hot = |letter: Option<usize>, column: usize| f64::from(column == ONE || Some(column) == letter);
            let half = D / 2;
            let angle = self.offset * THETA.powf(-2.0 * (column % half) as f64 / D as f64);
            match self.path.to_string().as_str() {
                "embedding.weight" => one_hot(letter_of(row), column),
                "start" => one_hot(Some(0), row),
                "stack.blocks.0.attention.k_proj.weight" => f64::from(row == ONE && column < half),
                // Turned back by the offset, so that they meet keys of that offset head-on.
                "stack.blocks.0.attention.q_proj.weight" if row == ONE && column < half => 20.0 * angle.cos(),
                "stack.blocks.0.attention.q_proj.weight" if row == ONE => -20.0 * angle.sin(),
                "stack.blocks.0.attention.v_proj.weight" => f64::from(row == column && row < N_LETTERS),
                "stack.blocks.0.attention.o_proj.weight" => 10.0 * f64::from(row < N_LETTERS && column == row + FOUND),
                "head.weight" => match letter_of(column) {
                    Some(letter) => 10.0 * f64::from(row == letter + FOUND),
                    None => -1000.0 * f64::from(row == ONE),
                },
                name => f64::from(name.ends_with("gamma")),
            }
        }
    }
    impl ModuleMapper for Build {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.enter(name, container_type);
        }
        fn exit_module(&mut self, _: &str, container_type: &str) {
            self.path.exit(container_type);
        }
        fn map_float<const N: usize>(&mut self, param: Param<Tensor<N>>) -> Param<Tensor<N>> {
            param.map(|tensor| {
                let shape = tensor.dims();
                let columns = if N == 1 { 1 } else { shape[N - 1] };
                let n = shape.iter().product::<usize>();
                let values: Vec<f32> = (0..n).map(|i| self.value(i / columns, i % columns) as f32).collect();
                Tensor::from_data(TensorData::new(values, shape), &tensor.device())
            })
        }
    }
    let config = parse(&format!(
        "architecture = \"flat\"\nvocab_size = 257\nd_model = {D}\n\
         [stack]\nn_layers = 1\nn_heads = 1\nd_ff = 4\npositions = {{ rope = {{ theta = {THETA:.1} }} }}\n"
    ));
    // The position that predicts a token holds the one before it.
    let mut build = Build { path: ParameterPath::default(), offset: (distance - 1) as f64 };
    Model::new(&config, 1, &Device::flex()).map(&mut build)
}

#[test]
fn a_model_that_copies_from_a_distance_gains_all_there_and_nothing_elsewhere() {
    with_setup(&copier(32), 96, 1200, |setup| {
        let outcome = copy(setup, &[8, 16], &[16, 24, 32, 48, 64]).unwrap();
        assert_eq!(outcome.len(), 10);
        for line in &outcome {
            let [plain, planted, gained] =
                [line.plain_nats_per_byte, line.planted_nats_per_byte, line.gained_nats_per_byte].map(|it| it.mean);
            assert!(plain > 10.0, "random letters cannot be copied: {line:?}");
            match line.distance_tokens {
                32 => assert!(planted < 1e-4 && (gained - plain).abs() < 1e-4, "{line:?}"),
                // A shorter distance than that by less than the span leaves an overlap of what is read and the plant.
                distance if distance.abs_diff(32) >= line.span_tokens => assert!(gained.abs() < 1e-4, "{line:?}"),
                _ => {}
            }
        }
        let outcome = context(setup, &[31, 32]).unwrap();
        let [less, enough] = [0, 1].map(|index| outcome.depths[index].lost_nats_per_byte);
        assert!(enough.mean.abs() < 1e-4 && less.mean.abs() > 1e-2, "{outcome:?}");
    });
}

#[test]
fn too_little_text_or_room_is_said() {
    let model = shaken_bytes(photon_case(2, "\"full\"", "\"chunk\"").config, &Device::flex());
    with_setup(&model, 96, 100, |setup| {
        let said = |error: ProbeError| error.to_string();
        assert_says(&said(length(setup, &[2]).unwrap_err()), &["length: the text has 100 tokens, at least 192"]);
        assert_says(&said(context(setup, &[4]).unwrap_err()), &["the text has 100 tokens, at least 192 are needed"]);
        assert_says(&said(context(setup, &[72]).unwrap_err()), &["depth 72: must be less than the context of 72"]);
        assert_says(&said(copy(setup, &[8], &[84]).unwrap_err()), &["distance 84: must be from 8 (the span) to 83"]);
        assert_says(&said(copy(setup, &[46], &[46]).unwrap_err()), &["span 46: ", "the longest that fits is 45"]);
        let setup = Setup { seq_len: 101, ..*setup };
        assert_says(&said(copy(&setup, &[8], &[8]).unwrap_err()), &["copy: the text has 100 tokens, at least 101"]);
        let setup = Setup { seq_len: 5, ..setup };
        assert_says(&said(context(&setup, &[0]).unwrap_err()), &["rows of 5 tokens are too short: at least 12"]);
        assert_says(&said(length(&setup, &[1]).unwrap_err()), &["rows of 5 tokens are too short: at least 6"]);
    });
}

fn probe(folder: &tempfile::TempDir, args: &[&str]) -> assert_cmd::Command {
    let path = folder.path().join("held-out.txt");
    std::fs::write(&path, some_text(2000)).unwrap();
    let mut command = photon_train(["probe", "--device", "cpu", "--windows", "8"]);
    command.arg(tiny_checkpoint()).arg("--text").arg(path).args(args);
    command
}

#[test]
fn the_program_measures_a_checkpoint_and_the_seed_decides() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let command = probe(&folder, &[&["--format", "json", "--spans", "4"], args].concat());
        json_of(command).remove(0)
    };
    let all = run(&[]);
    // As the run of the checkpoint has it.
    assert_eq!(all["seq_len"], 32);
    let distances: Vec<&Value> = all["copy"].as_array().unwrap().iter().map(|line| &line["distance_tokens"]).collect();
    assert_eq!(distances, [4, 8, 16]);
    let depths = all["context"]["depths"].as_array().unwrap();
    assert_eq!(depths.iter().map(|line| line["depth_tokens"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 4, 8, 16]);
    let mean = |of: &Value| of["mean"].as_f64().unwrap();
    for depth in depths {
        let lost = mean(&depth["nats_per_byte"]) - mean(&all["context"]["nats_per_byte"]);
        assert!((mean(&depth["lost_nats_per_byte"]) - lost).abs() < 1e-9, "{depth}");
    }
    let factors: Vec<&Value> =
        all["length"]["lengths"].as_array().unwrap().iter().map(|line| &line["factor"]).collect();
    assert_eq!(factors, [1, 2, 4, 8, 16]);
    assert_eq!((&all["context"]["n_windows"], &all["length"]["n_windows"]), (&8.into(), &2.into()));

    // Alone as among others.
    let context = run(&["--probe", "context"]);
    assert_eq!(context["context"], all["context"]);
    assert!(context.get("copy").is_none() && context.get("length").is_none());
    assert_ne!(run(&["--probe", "context", "--seed", "1"])["context"], all["context"]);

    // Rows of 32 do not hold the usual spans: a quarter of a window, which is shorter by less than a meta-chunk.
    let tables = stdout_of(probe(&folder, &[]));
    assert_says(&tables, &["copy: a span", "8 windows", "| 7 ", "| 24 (all)", "| 16    |         512 |", " ± "]);
    for (args, said) in [
        (&["--distances", "99", "--spans", "4"][..], "copy: distance 99: must be from 4"),
        (&["--factors", "100"], "length: the text has "),
        (&["--seq-len", "1"], "--seq-len 1: must be at least 2"),
        (&["--probe", "contxt"], "context"),
    ] {
        assert_says(&complaint_of(probe(&folder, args)), &[said]);
    }
}
