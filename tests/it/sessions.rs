//! Sessions: put aside, gone on with, forked, cut back, and squeezed.

use burn::tensor::Device;
use photon_core::advance::AdvanceRule;
use photon_core::infer_config::InferPlan;
use photon_core::model::Model;
use photon_core::snapshot::{self, SnapshotError};
use photon_core::state::TruncateError;
use photon_infer::session::{ReliefStep, Session, SessionError};

use crate::caches::{PLANS, plan, some_cases};
use crate::support::{flat_cases, max_difference, photon_case, random_rows, rows_of, shaken};
use crate::weights::Weights;

/// A session of one row that has taken up tokens in one call.
fn after<'m>(model: &'m Model, plan: &InferPlan, tokens: &[u32]) -> Session<'m> {
    let (mut session, _) = Session::new(model, plan, 1);
    session.extend(&[0], &[tokens.to_vec()]).unwrap();
    session
}

/// Takes up tokens one by one and returns all logits.
fn go_on(session: &mut Session, tokens: &[u32]) -> Vec<Vec<f32>> {
    tokens.iter().flat_map(|&token| rows_of(session.extend(&[0], &[vec![token]]).unwrap())).collect()
}

#[test]
fn a_then_b_then_a_gives_the_output_of_a_again() {
    for case in some_cases() {
        let model = shaken(&case.config, &Device::flex());
        let tokens = random_rows(3, 40, 31);
        for (name, toml) in PLANS {
            let (mut session, first) = Session::new(&model, &plan(toml, &case.config), 1);
            session.extend(&[0], &[tokens[0][..25].to_vec()]).unwrap();
            let snapshot = session.snapshot();
            let a = go_on(&mut session, &tokens[1]);
            session.restore(&snapshot);
            let b = go_on(&mut session, &tokens[2]);
            session.restore(&snapshot);
            assert_ne!(a, b);
            assert_eq!(go_on(&mut session, &tokens[1]), a, "{}, {name}", case.name);
            let again = session.reset();
            assert_eq!(rows_of(again), rows_of(first));
            session.extend(&[0], &[tokens[0][..25].to_vec()]).unwrap();
            assert_eq!(go_on(&mut session, &tokens[1]), a, "{}, {name}, after a reset", case.name);
        }
    }
}

#[test]
fn a_session_from_a_file_goes_on_as_if_nothing_had_happened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    for case in some_cases() {
        let model = shaken(&case.config, &Device::flex());
        let tokens = random_rows(2, 60, 32);
        let light = (case.config.meta_chunk_tokens() > 1).then_some(("recursive", "advance = \"recursive\""));
        for (name, toml) in PLANS.into_iter().chain([("exact", "")]).chain(light) {
            let plan = plan(toml, &case.config);
            let (mut session, _) = Session::new(&model, &plan, 2);
            session.extend(&[0, 1], &[tokens[0][..29].to_vec(), tokens[1][..8].to_vec()]).unwrap();
            session.end_prompt().unwrap();
            session.save(&path).unwrap();
            let mut loaded = Session::load(&model, &plan, &path).unwrap();
            assert_eq!(loaded.state().n_tokens(), [29, 8]);
            for step in 0..25 {
                let next = [vec![tokens[0][29 + step]], vec![tokens[1][8 + step]]];
                let expected = rows_of(session.extend(&[0, 1], &next).unwrap());
                let found = rows_of(loaded.extend(&[0, 1], &next).unwrap());
                assert_eq!(found, expected, "{}, {name}, step {step}", case.name);
            }
        }
    }
}

#[test]
fn snapshots_that_are_not_whole_or_not_ours_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let case = photon_case(2, "\"full\"", "\"chunk\"");
    let model = shaken(&case.config, &Device::flex());
    let session = after(&model, &plan(PLANS[3].1, &case.config), &random_rows(1, 30, 33)[0]);
    session.save(&path).unwrap();
    let refused = |reason: &str| {
        let error = snapshot::load(&path, &model).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("state.safetensors"), "{error}, expected {reason}");
    };

    let other = shaken(&photon_case(2, "\"block\"", "\"chunk\"").config, &Device::flex());
    assert!(matches!(snapshot::load(&path, &other), Err(SnapshotError::OtherModel { .. })));
    let missing = folder.path().join("none");
    assert!(matches!(snapshot::load(&missing, &model), Err(SnapshotError::Io { .. })));

    let whole = std::fs::read(&path).unwrap();
    for n_bytes in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..n_bytes]).unwrap();
        refused("damaged");
    }
    std::fs::write(&path, &whole).unwrap();
    let weights = Weights::read(&path);
    let mut fewer = weights.clone();
    let (name, _) = fewer.tensors.pop_first().unwrap();
    fewer.write(&path);
    refused(&name);
    let mut more = weights.clone();
    let (_, some) = weights.tensors.first_key_value().unwrap();
    more.tensors.insert("stray".into(), some.clone());
    more.write(&path);
    refused("stray");
    let mut reshaped = weights.clone();
    let tensor = reshaped.tensors.values_mut().next().unwrap();
    tensor.shape.push(1);
    reshaped.write(&path);
    refused("expected");
    let mut older = weights.clone();
    older.metadata.as_mut().unwrap().insert("photon_state_version".into(), "0".into());
    older.write(&path);
    refused("version 0");
    // Digits put before a number make it another.
    for (key, digit, found) in [("n_tail", 9, "contradict"), ("residual", 9_000_000, "cannot be")] {
        let mut record = weights.clone();
        let text = record.metadata.as_mut().unwrap().get_mut("photon_state").unwrap();
        *text = text.replacen(&format!("\"{key}\":"), &format!("\"{key}\":{digit}"), 1);
        record.write(&path);
        refused(found);
    }
}

#[test]
fn forks_share_the_prompt_and_nothing_else() {
    let case = photon_case(2, "\"full\"", "\"chunk\"");
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(3, 200, 34);
    let mut session = after(&model, &plan("", &case.config), &tokens[0]);
    let mut alone = session.clone();
    let mut fork = session.fork();
    let shared: Vec<usize> = fork.cache_use().iter().map(|stage| stage.shared_bytes).collect();
    assert!(shared[0] > 0 && shared[1] > 0, "{shared:?}");
    assert_eq!(shared[2..], [0, 0], "decoders drop what they cannot see");
    let of_fork = go_on(&mut fork, &tokens[1][..40]);
    assert_eq!(go_on(&mut session, &tokens[2][..40]).len(), 40);
    let of_clone = go_on(&mut alone, &tokens[1][..40]);
    for (fork, clone) in of_fork.iter().zip(&of_clone) {
        assert!(max_difference(fork, clone) < 1e-5);
    }
    let path = tempfile::tempdir().unwrap().keep().join("fork.safetensors");
    fork.save(&path).unwrap();
    let mut loaded = Session::load(&model, &plan("", &case.config), &path).unwrap();
    assert_eq!(go_on(&mut loaded, &tokens[2]), go_on(&mut fork, &tokens[2]));
}

#[test]
fn several_continuations_of_a_prompt_are_rows_that_share_it() {
    let case = photon_case(2, "\"full\"", "\"chunk\"");
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(3, 120, 35);
    let mut session = after(&model, &plan("", &case.config), &tokens[0]);
    let mut alone = session.clone();
    let used_by_one: usize = session.cache_use().iter().take(2).map(|stage| stage.used_bytes).sum();
    session.select_rows(&[0, 0, 0]);
    let used_by_three: usize = session.cache_use().iter().take(2).map(|stage| stage.used_bytes).sum();
    assert_eq!(used_by_three, used_by_one);
    let mut last = Vec::new();
    for step in 0..30 {
        let next: Vec<Vec<u32>> = tokens.iter().map(|row| vec![row[step]]).collect();
        last = rows_of(session.extend(&[0, 1, 2], &next).unwrap());
    }
    let expected = go_on(&mut alone, &tokens[2][..30]);
    assert!(max_difference(&last[2], expected.last().unwrap()) < 1e-5);
}

#[test]
fn a_state_cut_back_is_the_state_of_that_time() {
    let cases = [photon_case(3, "\"full\"", "{ stream = { window = 500 } }"), flat_cases().remove(0)];
    for case in cases {
        let model = shaken(&case.config, &Device::flex());
        let tokens = random_rows(2, 80, 36);
        let mut session = after(&model, &plan("", &case.config), &tokens[0]);
        for n_tokens in [72, 48, 36, 12] {
            session.truncate(&[n_tokens]).unwrap();
            let mut cut = session.clone();
            let mut fresh = after(&model, &plan("", &case.config), &tokens[0][..n_tokens]);
            for (cut, fresh) in go_on(&mut cut, &tokens[1]).iter().zip(go_on(&mut fresh, &tokens[1])) {
                let difference = max_difference(cut, &fresh);
                assert!(difference < 1e-4, "{} at {n_tokens}: {difference}", case.name);
            }
        }
    }
}

#[test]
fn what_cannot_be_taken_back_is_refused_and_changes_nothing() {
    let case = photon_case(2, "{ window = { units = 2 } }", "\"chunk\"");
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(2, 40, 37);
    let mut session = after(&model, &plan("", &case.config), &tokens[0]);
    let mut untouched = session.clone();
    let refusal = |session: &mut Session, n_tokens| match session.truncate(&[n_tokens]).unwrap_err() {
        SessionError::Truncate(error) => error,
        other => panic!("{other}"),
    };
    assert!(matches!(refusal(&mut session, 90), TruncateError::Ahead { current: 40, wanted: 90, .. }));
    assert!(matches!(refusal(&mut session, 7), TruncateError::InsideChunk { meta_chunk: 6, .. }));
    let dropped = refusal(&mut session, 6);
    assert!(dropped.to_string().contains("encoder 1") && dropped.to_string().contains("window"), "{dropped}");
    assert_eq!(go_on(&mut session, &tokens[1]), go_on(&mut untouched, &tokens[1]));

    session.state().clone().switch_rule(AdvanceRule::Recursive).unwrap();
    let light = plan("advance = \"recursive\"", &case.config);
    let mut session = after(&model, &light, &tokens[0]);
    session.end_prompt().unwrap();
    assert!(matches!(refusal(&mut session, 6), TruncateError::LightRule { .. }));
}

/// Budgets, then storage, then the rule give way; then the session refuses, and can go on with what it has.
#[test]
fn a_session_under_pressure_gives_way_step_by_step_and_loses_nothing() {
    let case = photon_case(3, "\"full\"", "\"chunk\"");
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(1, 8000, 38).remove(0);
    let toml = |budget: usize| {
        format!(
            "memory_budget_bytes = {budget}\n[[caches]]\nstages = \"lower encoders\"\nblock = 2\nfloor = {{ share = 0.2 }}\n\
             policy = {{ attention_mass = {{ budget = {{ share = 1.0 }} }} }}\n\
             [[caches]]\nstages = \"top encoder\"\nlightest = \"f16\"\n\
             [[caches]]\nstages = \"decoders\"\nlightest = \"f32\"\n"
        )
    };
    let free = after(&model, &plan(&toml(usize::MAX >> 1), &case.config), &tokens[..250]);
    assert!(free.reliefs().is_empty());
    let budget = free.state().bytes();

    let mut session = after(&model, &plan(&toml(budget), &case.config), &tokens[..150]);
    let mut n_taken = 150;
    let refusal = loop {
        match session.extend(&[0], &[vec![tokens[n_taken]]]) {
            Ok(logits) => {
                assert!(rows_of(logits)[0].iter().all(|logit| logit.is_finite()));
                assert!(session.state().bytes() <= budget, "{} of {budget}", session.state().bytes());
                n_taken += 1;
            }
            Err(error) => break error,
        }
        if n_taken == tokens.len() {
            break SessionError::OverBudget { held_bytes: 0, needed_bytes: 0, budget_bytes: 0, taken_tokens: 0 };
        }
    };
    assert!(n_taken > 400, "{n_taken}: what gives way makes room for more");
    let kinds: Vec<u8> = session
        .reliefs()
        .iter()
        .map(|relief| match relief.step {
            ReliefStep::Budget { .. } => 0,
            ReliefStep::Storage { .. } => 1,
            ReliefStep::Advance { .. } => 2,
        })
        .collect();
    assert!(kinds.is_sorted(), "{:#?}", session.reliefs());
    assert!([0, 1, 2].iter().all(|kind| kinds.contains(kind)), "{:#?}", session.reliefs());
    assert!(session.reliefs().iter().all(|relief| relief.to_string().contains("memory is short at token")));
    let SessionError::OverBudget { needed_bytes, budget_bytes, .. } = refusal else { panic!("{refusal}") };
    assert!(needed_bytes > budget_bytes && budget_bytes == budget, "{refusal}");
    assert_eq!(session.state().n_tokens(), [n_taken], "nothing is lost");
    // With more memory it goes on where it stands.
    let snapshot = session.snapshot();
    let (mut larger, _) = Session::new(&model, &plan(&toml(2 * budget), &case.config), 1);
    larger.restore(&snapshot);
    larger.extend(&[0], &[vec![tokens[0]]]).unwrap();
    assert_eq!(larger.state().n_tokens(), [n_taken + 1]);
}

#[test]
fn a_prompt_that_does_not_fit_is_taken_up_as_far_as_it_fits() {
    let case = flat_cases().remove(0);
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(1, 2000, 39).remove(0);
    let toml = "memory_budget_bytes = 30000\n[[caches]]\nstages = \"all\"\nlightest = \"f16\"\n";
    let (mut session, _) = Session::new(&model, &plan(toml, &case.config), 1);
    let Err(SessionError::OverBudget { taken_tokens, .. }) = session.extend(&[0], std::slice::from_ref(&tokens)) else {
        panic!("2000 tokens cannot fit");
    };
    assert_eq!(session.state().n_tokens(), [taken_tokens]);
    assert!(taken_tokens > 100, "{taken_tokens}");
    assert!(session.state().bytes() <= 30_000);
}
