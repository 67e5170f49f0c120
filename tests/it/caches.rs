//! Caches in whole models: exactness where it is claimed, independence of cutting, and how they grow.

use burn::tensor::Device;
use photon_core::advance::AdvanceRule;
use photon_core::cache::config::Storage;
use photon_core::config::ModelConfig;
use photon_core::infer_config::{InferConfig, InferPlan};
use photon_core::model::Model;
use photon_core::state::State;

use crate::support::{Case, flat_cases, max_difference, photon_case, photon_cases, random_rows, rows_of, shaken};

/// A plan from TOML.
pub(crate) fn plan(toml: &str, model: &ModelConfig) -> InferPlan {
    let config: InferConfig = toml::from_str(toml).unwrap_or_else(|error| panic!("{error}\n{toml}"));
    config.plan(model).unwrap_or_else(|error| panic!("{error}\n{toml}"))
}

/// Storage, residual windows and policies of every kind, for any small model.
pub(crate) const PLANS: [(&str, &str); 9] = [
    ("int8", "[[caches]]\nstages = \"all\"\nkeys = \"int8\"\nvalues = \"int8\""),
    ("int8 keys, int4 values", "[[caches]]\nstages = \"all\"\nkeys = \"int8\"\nvalues = \"int4\""),
    (
        "f16, int4 at the top",
        "[[caches]]\nstages = \"all\"\nkeys = \"f16\"\nvalues = \"bf16\"\n[[caches]]\nstages = \"top encoder\"\nkeys = \"int4\"\nvalues = \"int4\"",
    ),
    ("residual", "[[caches]]\nstages = \"all\"\nkeys = \"int8\"\nvalues = \"int4\"\nresidual = 3\nblock = 2"),
    ("window", "[[caches]]\nstages = \"encoders\"\npolicy = { window = { recent = 3, sinks = 1 } }"),
    (
        "attention mass",
        "[[caches]]\nstages = \"encoders\"\nblock = 2\npolicy = { attention_mass = { budget = { share = 0.4 }, sinks = 1 } }",
    ),
    ("random", "[[caches]]\nstages = \"all\"\nblock = 1\npolicy = { random = { budget = { entries = 8 } } }"),
    (
        "lru, int8",
        "[[caches]]\nstages = \"all\"\nkeys = \"int8\"\nblock = 2\npolicy = { lru = { budget = { entries = 12 } } }",
    ),
    ("int8 activations", "activations = \"int8\""),
];

/// Takes up tokens in pieces, and returns the logits of the token after them.
fn take_up(model: &Model, state: &mut State, tokens: &[u32], piece_len: usize) -> Vec<f32> {
    let pieces = tokens.chunks(piece_len);
    pieces.map(|piece| rows_of(model.extend(state, &[0], &[piece.to_vec()])).remove(0)).last().unwrap()
}

/// Models for which every plan can be: where blocks are picked by their scores, nothing may leave.
pub(crate) fn some_cases() -> Vec<Case> {
    let mut cases: Vec<Case> = flat_cases().into_iter().filter(|case| !case.name.contains("top")).collect();
    cases.push(photon_case(1, "\"full\"", "\"chunk\""));
    cases.push(photon_case(2, "{ window = { units = 2 } }", "{ stream = { window = 5 } }"));
    cases.push(photon_case(3, "\"block\"", "{ lookback = { chunks = 1 } }"));
    cases
}

#[test]
fn asking_for_f32_and_everything_changes_no_bit() {
    for case in photon_cases().into_iter().chain(flat_cases()) {
        let model = shaken(&case.config, &Device::flex());
        let tokens = random_rows(1, 25, 21).remove(0);
        let asked =
            plan("[[caches]]\nstages = \"all\"\nkeys = \"f32\"\nvalues = \"f32\"\npolicy = \"full\"", &case.config);
        let (mut as_asked, _) = model.begin_with(1, &asked);
        let (mut as_always, _) = model.begin(1);
        for piece_len in [5, 1] {
            let of = |state: &mut State| take_up(&model, state, &tokens, piece_len);
            assert_eq!(of(&mut as_asked), of(&mut as_always), "{}", case.name);
        }
    }
}

#[test]
fn results_do_not_depend_on_how_a_prompt_is_cut() {
    for case in some_cases() {
        let model = shaken(&case.config, &Device::flex());
        let tokens = random_rows(1, 45, 22).remove(0);
        for (name, toml) in PLANS {
            let plan = plan(toml, &case.config);
            let of = |piece_len| take_up(&model, &mut model.begin_with(1, &plan).0, &tokens, piece_len);
            let token_by_token = of(1);
            for piece_len in [45, 7, 4] {
                let difference = max_difference(&of(piece_len), &token_by_token);
                // Int8 codes of numbers that differ in the last bit may differ by a step.
                let tolerance = if name.contains("int") || name == "residual" { 2e-2 } else { 1e-4 };
                assert!(difference < tolerance, "{}, {name}, pieces of {piece_len}: {difference}", case.name);
            }
        }
    }
}

#[test]
fn a_window_shorter_than_the_prompt_stays_causal() {
    let case = photon_case(2, "\"full\"", "\"chunk\"");
    let model = shaken(&case.config, &Device::flex());
    let window = plan("[[caches]]\nstages = \"encoders\"\npolicy = { window = { recent = 2 } }", &case.config);
    let tokens = random_rows(1, 48, 23).remove(0);
    let logits = |tokens: &[u32], piece_len| take_up(&model, &mut model.begin_with(1, &window).0, tokens, piece_len);
    for prompt_len in [12, 30] {
        // A position sees only what stands before it, so what it gives does not depend on what comes in the same call.
        let alone = logits(&tokens[..prompt_len], 1);
        let together = logits(&tokens[..prompt_len], prompt_len);
        assert!(max_difference(&alone, &together) < 1e-4);
    }
}

#[test]
fn the_lighter_the_storage_the_farther_from_exact() {
    let case = photon_case(3, "\"full\"", "\"chunk\"");
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(1, 47, 24).remove(0);
    let exact = take_up(&model, &mut model.begin(1).0, &tokens, 47);
    let distance = |storage: &str| {
        let toml = format!("[[caches]]\nstages = \"all\"\nkeys = \"{storage}\"\nvalues = \"{storage}\"");
        let (mut state, _) = model.begin_with(1, &plan(&toml, &case.config));
        max_difference(&take_up(&model, &mut state, &tokens, 47), &exact)
    };
    let distances = ["f16", "bf16", "int8", "int4"].map(distance);
    assert!(distances.is_sorted() && distances[0] > 0.0, "{distances:?}");
    assert!(distances[2] < 0.1, "{distances:?}");
}

#[test]
fn rows_with_lossy_caches_do_not_notice_each_other() {
    for case in some_cases() {
        let model = shaken(&case.config, &Device::flex());
        for (name, toml) in PLANS {
            let plan = plan(toml, &case.config);
            let rows = random_rows(2, 30, 25);
            let (mut both, _) = model.begin_with(2, &plan);
            model.extend(&mut both, &[0, 1], &[rows[0][..13].to_vec(), rows[1][..4].to_vec()]);
            for step in 0..12 {
                let next = [vec![rows[0][13 + step]], vec![rows[1][4 + step]]];
                let together = rows_of(model.extend(&mut both, &[0, 1], &next));
                for (row, prompt_len) in [(0, 13), (1, 4)] {
                    if step < 11 {
                        continue;
                    }
                    let alone = take_up(&model, &mut model.begin_with(1, &plan).0, &rows[row][..prompt_len + 12], 30);
                    let difference = max_difference(&together[row], &alone);
                    assert!(difference < 2e-2, "{}, {name}, row {row}: {difference}", case.name);
                }
            }
        }
    }
}

/// Only the top cache of a model with windows below grows with the context.
#[test]
fn below_the_top_a_bounded_model_holds_as_much_at_any_length() {
    let config = crate::support::parse(
        "architecture = \"photon\"\nvocab_size = 13\nd_model = 8\n\
         [[levels]]\nchunk_len = 4\nd_model = 8\nconverter = { prefix_len = 1 }\n\
         encoder = { n_layers = 1, n_heads = 1, d_ff = 8, attention = { window = { units = 12 } } }\n\
         decoder = { n_layers = 1, n_heads = 1, d_ff = 8, attention = { stream = { window = 10 } } }\n\
         [[levels]]\nchunk_len = 4\nd_model = 8\nconverter = { prefix_len = 1 }\n\
         encoder = { n_layers = 1, n_heads = 1, d_ff = 8, attention = { window = { units = 8 } } }\n\
         decoder = { n_layers = 1, n_heads = 1, d_ff = 8, attention = \"chunk\" }\n\
         [[levels]]\nchunk_len = 4\nd_model = 8\nconverter = { prefix_len = 1 }\n\
         encoder = { n_layers = 1, n_heads = 1, d_ff = 8 }\n\
         decoder = { n_layers = 1, n_heads = 1, d_ff = 8, attention = \"chunk\" }\n",
    );
    let model = shaken(&config, &Device::flex());
    let tokens = random_rows(1, 65_536, 26).remove(0);
    let (mut state, _) = model.begin(1);
    let mut taken = 0;
    let mut held = Vec::new();
    for n_tokens in [64, 4096, 65_536] {
        take_up(&model, &mut state, &tokens[taken..n_tokens], 1024);
        taken = n_tokens;
        let found = state.cache_use();
        let entries: Vec<usize> = found.iter().map(|stage| stage.entries).collect();
        assert_eq!(found[2].stage, "encoder 3");
        assert_eq!(entries[2], n_tokens / 64, "the top holds every unit");
        let bytes: Vec<usize> = found.iter().map(|stage| stage.allocated_bytes).collect();
        held.push([&entries[..2], &entries[3..], &bytes[..2], &bytes[3..]].concat());
    }
    assert_eq!(held[1][..2], [11, 7], "what the next unit sees beside itself");
    assert_eq!(held[1], held[2]);
}

#[test]
fn light_rules_and_lossy_caches_go_together() {
    let case = photon_case(3, "\"full\"", "{ stream = { window = 5 } }");
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(1, 60, 27).remove(0);
    for rule in [AdvanceRule::Chunk, AdvanceRule::Recursive] {
        let toml = format!("advance = \"{rule}\"\n{}", PLANS[3].1);
        let plan = plan(&toml, &case.config);
        let of = |piece_len| {
            let (mut state, _) = model.begin_with(1, &plan);
            take_up(&model, &mut state, &tokens[..17], 17);
            state.end_prompt(&plan).unwrap();
            assert_eq!(state.advance_rule(), rule);
            take_up(&model, &mut state, &tokens[17..], piece_len)
        };
        assert!(max_difference(&of(1), &of(43)) < 2e-2);
    }
}

#[test]
fn plans_that_cannot_be_are_refused_by_name() {
    let photon = photon_case(2, "\"full\"", "\"chunk\"").config;
    let flat = flat_cases().remove(0).config;
    let refusal = |toml: &str, model: &ModelConfig| {
        toml::from_str::<InferConfig>(toml).unwrap().plan(model).unwrap_err().to_string()
    };
    let expect = |toml: &str, model: &ModelConfig, words: &[&str]| {
        let message = refusal(toml, model);
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    expect(
        "[[caches]]\nstages = \"encoder 3\"\nkeys = \"f16\"",
        &photon,
        &["caches.0.stages", "encoder 3", "encoder 2"],
    );
    expect("advance = \"recursive\"", &flat, &["advance", "recursive", "hierarchical"]);
    expect("memory_budget_bytes = 0", &flat, &["memory_budget_bytes"]);
    expect("[[caches]]\nstages = \"all\"\nblock = 0", &flat, &["block", "at least 1"]);
    let small = "[[caches]]\nstages = \"stack\"\npolicy = { tova = { budget = { entries = 3 } } }";
    expect(small, &flat, &["stack", "tova.budget", "17 entries"]);
    let share = "[[caches]]\nstages = \"all\"\npolicy = { lru = { budget = { share = 1.5 } } }";
    expect(share, &photon, &["lru.budget", "at most 1"]);
    expect("[[caches]]\nstages = \"all\"\nfloor = { share = 0.1 }", &photon, &["floor", "policy"]);
    let units =
        "[[caches]]\nstages = \"all\"\nfloor = { entries = 90 }\npolicy = { lru = { budget = { share = 0.5 } } }";
    expect(units, &photon, &["floor", "unit"]);
    let window = "[[caches]]\nstages = \"all\"\npolicy = { window = { recent = 0 } }";
    expect(window, &photon, &["window.recent", "at least 1"]);
    for (toml, word) in [
        ("[[caches]]\nstages = \"upper\"", "lower encoders"),
        ("[[caches]]\nstages = \"all\"\nkeys = \"int3\"", "int4"),
        ("[[caches]]\nstages = \"all\"\npolicy = \"lfu\"", "lru"),
        ("advanced = \"chunk\"", "advance"),
    ] {
        let message = toml::from_str::<InferConfig>(toml).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
    assert_eq!(Storage::F32.lighter(), Some(Storage::F16));
}
