//! Blocks in host memory, in whole models: exactness, whatever the storage, and what is refused.

use burn::tensor::Device;
use photon_core::config::ModelConfig;
use photon_core::infer_config::InferConfig;
use photon_core::model::Model;
use photon_core::state::State;
use photon_infer::session::Session;

use crate::caches::plan;
use crate::support::{
    Case, PICKED, STRIDED, flat_case, forward, max_difference, photon_case, random_rows, rows_of, shaken,
};

/// Two blocks are taken, and the sinks' block is one of those that may be.
const TWO_PICKED: &str = "{ sparse = { window = 3, sinks = 2, block = 1, pick = { top = 2 } } }";

/// A decoder that drops nothing in these tests, so that a state can be cut back.
const DECODER: &str = "{ stream = { window = 500 } }";

/// Models whose attention picks blocks, with the stages that do.
fn cases() -> Vec<(Case, &'static str)> {
    vec![
        (flat_case(PICKED), "stack"),
        (flat_case(TWO_PICKED), "stack"),
        (photon_case(1, PICKED, DECODER), "encoders"),
        (photon_case(2, TWO_PICKED, DECODER), "encoders"),
    ]
}

/// Hardly more blocks on the device than are taken at once.
fn offload(stages: &str, storage: &str) -> String {
    format!(
        "[[caches]]\nstages = \"{stages}\"\noffload = {{ resident_blocks = 3, prefetch = true }}\n\
         [[caches]]\nstages = \"all\"\nkeys = \"{storage}\"\nvalues = \"{storage}\""
    )
}

fn take_up(model: &Model, state: &mut State, tokens: &[u32], piece_len: usize) -> Vec<f32> {
    let pieces = tokens.chunks(piece_len);
    pieces.map(|piece| rows_of(model.extend(state, &[0], &[piece.to_vec()])).remove(0)).last().unwrap()
}

#[test]
fn with_blocks_in_host_memory_generation_equals_the_training_forward() {
    for (case, stages) in cases() {
        let model = shaken(&case.config, &Device::flex());
        let plan = plan(&offload(stages, "f32"), &case.config);
        let tokens = random_rows(1, 61, 41).remove(0);
        let expected = forward(&model, std::slice::from_ref(&tokens)).remove(0);
        for piece_len in [1, 2, 7, 60] {
            for n_tokens in [20, 43, 60] {
                let (mut state, _) = model.begin_with(1, &plan);
                let found = take_up(&model, &mut state, &tokens[..n_tokens], piece_len);
                let difference = max_difference(&found, &expected[n_tokens]);
                assert!(difference < 1e-4, "{}, {n_tokens} in pieces of {piece_len}: {difference}", case.name);
                let used = state.cache_use().into_iter().filter_map(|stage| stage.offload).next().unwrap();
                assert!(n_tokens < 60 || used.misses > 0 && used.hits > 0 && used.prefetched > 0, "{used:?}");
            }
        }
    }
}

#[test]
fn rows_at_different_places_take_blocks_of_their_own() {
    for (case, stages) in cases() {
        let model = shaken(&case.config, &Device::flex());
        let prompt_lens = [1, 30, 12];
        let rows = random_rows(3, 61, 42);
        let expected = forward(&model, &rows);
        let (mut state, _) = model.begin_with(3, &plan(&offload(stages, "f32"), &case.config));
        let prompts: Vec<Vec<u32>> = rows.iter().zip(prompt_lens).map(|(row, n)| row[..n].to_vec()).collect();
        let mut logits = rows_of(model.extend(&mut state, &[0, 1, 2], &prompts));
        for step in 0..30 {
            for (row, prompt_len) in prompt_lens.into_iter().enumerate() {
                let difference = max_difference(&logits[row], &expected[row][prompt_len + step]);
                assert!(difference < 1e-4, "{}: row {row}, step {step}: {difference}", case.name);
            }
            let next: Vec<Vec<u32>> = rows.iter().zip(prompt_lens).map(|(row, n)| vec![row[n + step]]).collect();
            logits = rows_of(model.extend(&mut state, &[0, 1, 2], &next));
        }
    }
}

#[test]
fn a_storage_costs_in_host_memory_what_it_costs_on_the_device() {
    for (case, stages) in cases() {
        let model = shaken(&case.config, &Device::flex());
        let tokens = random_rows(1, 60, 43).remove(0);
        for storage in ["f16", "bf16", "int8", "int4"] {
            let with_tier = offload(stages, storage);
            let without = with_tier.replace("offload = { resident_blocks = 3, prefetch = true }", "");
            let of = |toml: &str| take_up(&model, &mut model.begin_with(1, &plan(toml, &case.config)).0, &tokens, 1);
            let difference = max_difference(&of(&with_tier), &of(&without));
            assert!(difference < 1e-4, "{}, {storage}: {difference}", case.name);
        }
    }
}

#[test]
fn sessions_with_blocks_in_host_memory_are_saved_forked_and_cut_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let go_on = |session: &mut Session, tokens: &[u32]| -> Vec<Vec<f32>> {
        tokens.iter().flat_map(|&token| rows_of(session.extend(&[0], &[vec![token]]).unwrap())).collect()
    };
    for (case, stages) in cases() {
        let model = shaken(&case.config, &Device::flex());
        let plan = plan(&offload(stages, "int8"), &case.config);
        let tokens = random_rows(3, 60, 44);
        let (mut session, _) = Session::new(&model, &plan, 1);
        session.extend(&[0], &[tokens[0].clone()]).unwrap();
        session.save(&path).unwrap();
        let mut loaded = Session::load(&model, &plan, &path).unwrap();
        let mut fork = session.fork();
        let snapshot = session.snapshot();
        let expected = go_on(&mut session, &tokens[1]);
        assert_eq!(go_on(&mut loaded, &tokens[1]), expected, "{}", case.name);
        assert_ne!(go_on(&mut fork, &tokens[2]), expected);
        // A multiple of every meta-chunk.
        session.restore(&snapshot);
        session.extend(&[0], &[tokens[2].clone()]).unwrap();
        session.truncate(&[60]).unwrap();
        for (found, expected) in go_on(&mut session, &tokens[1]).iter().zip(&expected) {
            assert!(max_difference(found, expected) < 1e-4, "{}", case.name);
        }
    }
}

#[test]
fn a_session_out_of_memory_stores_blocks_lighter_wherever_they_are() {
    let case = flat_case(PICKED);
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(1, 300, 45);
    let toml = |budget: usize| {
        let rule = "[[caches]]\nstages = \"all\"\nlightest = \"f16\"";
        format!("memory_budget_bytes = {budget}\n{}\n{rule}", offload("stack", "f32"))
    };
    let taken_with = |budget: usize| {
        let (mut session, _) = Session::new(&model, &plan(&toml(budget), &case.config), 1);
        session.extend(&[0], &tokens).unwrap();
        let host_bytes = session.cache_use()[0].offload.unwrap().host_bytes;
        (session.state().bytes(), host_bytes, session.reliefs().len())
    };
    let (bytes, host_bytes, n_reliefs) = taken_with(usize::MAX >> 1);
    assert_eq!(n_reliefs, 0);
    let (lighter_bytes, lighter_host_bytes, n_reliefs) = taken_with(bytes - 1);
    assert_eq!(n_reliefs, 1);
    assert!(lighter_bytes < bytes);
    assert_eq!(2 * lighter_host_bytes, host_bytes, "f16 for f32");
}

#[test]
fn without_a_tier_no_hits_are_reported() {
    let (case, stages) = cases().remove(3);
    let model = shaken(&case.config, &Device::flex());
    let (state, _) = model.begin_with(1, &plan(&offload(stages, "f32"), &case.config));
    let report = serde_json::to_value(state.cache_use()).unwrap();
    for stage in report.as_array().unwrap() {
        let is_encoder = stage["stage"].as_str().unwrap().starts_with("encoder");
        assert_eq!(stage.get("offload").is_some(), is_encoder, "{stage}");
    }
}

#[test]
fn offload_is_refused_by_name_where_nothing_is_cold() {
    let refusal = |toml: &str, model: &ModelConfig| {
        toml::from_str::<InferConfig>(toml).unwrap().plan(model).unwrap_err().to_string()
    };
    let expect = |message: String, words: &[&str]| {
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    let (picked, _) = cases().remove(3);
    let all = "[[caches]]\nstages = \"all\"\noffload = { resident_blocks = 8 }";
    expect(refusal(all, &picked.config), &["decoder 1", "offload", "scores", "name the stages"]);
    for attention in ["\"full\"", STRIDED] {
        expect(refusal(all, &flat_case(attention).config), &["stack", "offload", "scores"]);
    }
    let few = "[[caches]]\nstages = \"encoders\"\noffload = { resident_blocks = 1 }";
    expect(refusal(few, &picked.config), &["encoder 1", "resident_blocks", "at least 2"]);
    let window =
        "[[caches]]\nstages = \"encoders\"\npolicy = { window = { recent = 3 } }\noffload = { resident_blocks = 2 }";
    expect(refusal(window, &picked.config), &["policy", "window"]);
    let unknown = "[[caches]]\nstages = \"all\"\noffload = { resident = 8 }";
    let message = toml::from_str::<InferConfig>(unknown).unwrap_err().to_string();
    expect(message, &["resident_blocks"]);
    let prefetch = |more: &str| {
        let toml = format!("[[caches]]\nstages = \"encoders\"\noffload = {{ resident_blocks = 2{more} }}");
        plan(&toml, &picked.config).caches[0].config.offload.unwrap().prefetch
    };
    assert!(!prefetch("") && prefetch(", prefetch = true"));
}
