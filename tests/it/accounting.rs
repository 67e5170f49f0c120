//! What the accounting says is what the built model has.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use photon_core::accounting::{CacheDtype, cache_cost, model_cost};
use photon_core::config::{ModelConfig, PhotonConfig, StackSpec};
use photon_core::model::Model;
use photon_core::nn::span::Span;

use crate::support::{STRIDED, flat_cases, parse, photon_case, photon_cases, random_rows};

/// Parameter counts of the paper's tables 4 to 12.
#[test]
fn presets_have_the_papers_parameters_to_the_unit() {
    let presets = [
        (include_str!("../../configs/model/photon-600m.toml"), 646_399_104),
        (include_str!("../../configs/model/photon-900m.toml"), 907_162_368),
        (include_str!("../../configs/model/photon-1.2b.toml"), 1_229_531_520),
        (include_str!("../../configs/model/flat-600m.toml"), 610_915_968),
        (include_str!("../../configs/model/flat-900m.toml"), 867_114_752),
        (include_str!("../../configs/model/flat-1.2b.toml"), 1_184_657_280),
        (include_str!("../../configs/model/block-600m.toml"), 629_770_752),
    ];
    for (toml, expected) in presets {
        assert_eq!(model_cost(&parse(toml), 2048).parameters(), expected, "{toml}");
    }
}

#[test]
fn parameters_are_those_of_the_built_model() {
    for case in photon_cases().into_iter().chain(flat_cases()) {
        let cost = model_cost(&case.config, 64);
        let model = Model::new(&case.config, 0, &Device::flex());
        assert_eq!(cost.parameters() + cost.start_parameters, model.num_params(), "{}", case.name);
    }
}

#[test]
fn weights_are_read_once_for_the_tokens_that_a_step_of_their_stage_makes() {
    let cost = |config: &ModelConfig| model_cost(config, 1);
    let of = |config: &ModelConfig, stage: &str| {
        let stages = cost(config).stages;
        stages.into_iter().filter(|found| found.stage == stage).map(|found| found.parameters).sum::<usize>() as f64
    };
    let flat = flat_cases().remove(0).config;
    assert_eq!(cost(&flat).weights_read_per_token(), of(&flat, "stack") + of(&flat, "head"));
    // Chunks of two, then of three.
    let photon = photon_case(2, "\"full\"", "\"chunk\"").config;
    let of = |stage| of(&photon, stage);
    let expected = of("head")
        + of("decoder 1")
        + (of("chunker 1") + of("encoder 1") + of("converter 1") + of("decoder 2")) / 2.0
        + (of("chunker 2") + of("encoder 2") + of("converter 2")) / 6.0;
    let found = cost(&photon).weights_read_per_token();
    assert!((found - expected).abs() < 1e-9 * expected, "{found} {expected}");
}

/// Every matrix of the built model times the positions it runs at, and every pair that attention sees.
#[test]
fn flops_are_those_of_the_built_model() {
    struct Matrices {
        path: Vec<String>,
        found: Vec<(String, usize)>,
    }
    impl ModuleVisitor for Matrices {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if D == 2 {
                self.found.push((self.path.join("."), param.val().shape().num_elements()));
            }
        }
    }
    for case in photon_cases().into_iter().chain(flat_cases()) {
        let seq_len = 12 * case.config.meta_chunk_tokens();
        let mut matrices = Matrices { path: Vec::new(), found: Vec::new() };
        Model::new(&case.config, 0, &Device::flex()).visit(&mut matrices);
        let products: usize = matrices
            .found
            .iter()
            .filter(|(path, _)| !path.contains("embedding"))
            .map(|(path, size)| 2 * size * positions(&case.config, path, seq_len))
            .sum();
        let expected = (products + attention_flops(&case.config, seq_len)) as f64 / seq_len as f64;
        let counted = model_cost(&case.config, seq_len).forward_flops_per_token();
        assert!((counted - expected).abs() < 1e-6 * expected, "{}: {counted}, built {expected}", case.name);
    }
}

/// Positions at which the matrix at `path` runs.
fn positions(config: &ModelConfig, path: &str, seq_len: usize) -> usize {
    let ModelConfig::Photon(config) = config else { return seq_len };
    let parts: Vec<&str> = path.split('.').collect();
    let stage = parts.iter().position(|part| matches!(*part, "encoders" | "decoders"));
    let Some(stage) = stage else { return seq_len };
    let level = parts[stage + 1].parse::<usize>().unwrap() + 1;
    match (parts[stage], path.contains("converter")) {
        ("encoders", _) => seq_len / config.tokens_per_unit(level),
        (_, true) => seq_len / config.tokens_per_unit(level),
        (_, false) => seq_len / config.tokens_per_unit(level) * config.group_len(level),
    }
}

fn attention_flops(config: &ModelConfig, seq_len: usize) -> usize {
    let flops =
        |spec: StackSpec, n| spec.n_layers * (0..n).map(|query| attention_flops_of(&spec, query)).sum::<usize>();
    match config {
        ModelConfig::Flat(config) => flops(config.spec(), seq_len),
        ModelConfig::Photon(config) => (1..=config.n_levels())
            .map(|level| {
                let n_units = seq_len / config.tokens_per_unit(level);
                flops(config.encoder_spec(level), n_units)
                    + flops(config.decoder_spec(level), n_units * config.group_len(level))
            })
            .sum(),
    }
}

/// What one query of one layer meets, key by key.
fn attention_flops_of(spec: &StackSpec, query: usize) -> usize {
    let per_pair = 4 * spec.d_model;
    let Some(pick) = spec.pick else {
        return per_pair * (0..=query).filter(|&key| spec.span.sees(query, key)).count();
    };
    // No choice opens more than the newest blocks: they overlap least with the first positions.
    let n_blocks = (0..=query).filter(|block| (block + 1) * pick.block + pick.window <= query + 1).count();
    let newest = n_blocks.saturating_sub(pick.top)..n_blocks;
    let sees = |&key: &usize| pick.always_sees(query, key) || newest.contains(&(key / pick.block));
    per_pair * (0..=query).filter(sees).count() + 2 * spec.n_kv_heads * spec.head_dim() * n_blocks
}

#[test]
fn cache_bytes_are_those_of_the_built_state() {
    for case in photon_cases().into_iter().chain(flat_cases()) {
        let model = Model::new(&case.config, 0, &Device::flex());
        let n_tokens = 5 * case.config.meta_chunk_tokens() + 3;
        let (mut state, _) = model.begin(1);
        model.extend(&mut state, &[0], &random_rows(1, n_tokens, 1));
        for (cost, found) in cache_cost(&case.config).into_iter().zip(state.cache_use()) {
            assert_eq!(cost.stage, found.stage);
            assert_eq!(found.used_bytes, found.entries * cost.numbers_per_entry * CacheDtype::F32.bytes());
            // The flat model's start embedding is an entry that stands for no token.
            let start = usize::from(cost.stage == "stack");
            match cost.max_entries {
                None if cost.kept_one_in > 1 => {}
                None => assert_eq!(found.entries, n_tokens / cost.tokens_per_entry + start, "{}", case.name),
                Some(max) => assert!(found.entries <= max, "{}: {}", case.name, cost.stage),
            }
        }
        for (spec, found) in specs(&case.config).into_iter().zip(state.cache_use()) {
            // What the next position sees of those before it: a bounded cache keeps that and no more.
            let (span, n_positions) = spec(n_tokens);
            let n_live = span.live_entries(n_positions);
            let n_most = if matches!(span, Span::Strided { .. }) { n_live + MOST_WAITING } else { n_live };
            assert!((n_live..=n_most).contains(&found.entries), "{}: {}", case.name, found.stage);
        }
    }
}

/// Entries in the midst of others that nobody sees any more wait for a block's worth of them.
const MOST_WAITING: usize = 16;

type SpanAt = Box<dyn Fn(usize) -> (Span, usize)>;

/// The span of every stack, encoders first, and the positions it has run after so many tokens.
fn specs(config: &ModelConfig) -> Vec<SpanAt> {
    let config = match config.clone() {
        ModelConfig::Flat(config) => return vec![Box::new(move |n_tokens| (config.spec().span, n_tokens + 1))],
        ModelConfig::Photon(config) => config,
    };
    let mut spans: Vec<SpanAt> = Vec::new();
    for level in 1..=config.n_levels() {
        let config = config.clone();
        let per_unit = config.tokens_per_unit(level);
        spans.push(Box::new(move |n_tokens| (config.encoder_spec(level).span, n_tokens / per_unit)));
    }
    for level in 1..=config.n_levels() {
        let config = config.clone();
        spans.push(Box::new(move |n_tokens| {
            let n_units = n_tokens / config.tokens_per_unit(level - 1);
            let (chunk_len, prefix_len) =
                (config.levels[level - 1].chunk_len, config.levels[level - 1].converter.prefix_len);
            let in_group = prefix_len + n_units % chunk_len;
            (config.decoder_spec(level).span, n_units / chunk_len * config.group_len(level) + in_group)
        }));
    }
    spans
}

#[test]
fn a_strided_cache_grows_by_what_is_kept() {
    let case = photon_case(1, STRIDED, "{ stream = { window = 5 } }");
    let model = Model::new(&case.config, 0, &Device::flex());
    let used_bytes = |n_tokens: usize| {
        let (mut state, _) = model.begin(1);
        model.extend(&mut state, &[0], &random_rows(1, n_tokens, 1));
        state.cache_use()[0].used_bytes as f64
    };
    let growth = cache_cost(&case.config)[0].growth_bytes_per_token(CacheDtype::F32);
    // Whole strides: 2 tokens a unit, 4 units a stride. Entries that nobody sees any more leave by the block.
    let waiting = (MOST_WAITING * cache_cost(&case.config)[0].numbers_per_entry * CacheDtype::F32.bytes()) as f64;
    let grown = used_bytes(432) - used_bytes(112);
    assert!((grown - 320.0 * growth).abs() <= waiting, "{grown}, {growth} a token");
    let full = cache_cost(&photon_case(1, "\"full\"", "\"chunk\"").config)[0].growth_bytes_per_token(CacheDtype::F32);
    assert_eq!(full, 2.0 * growth, "every second block is kept");
}

/// The paper's §4 in bytes: 12.8 times less than flat, 64 times less at the top alone.
#[test]
fn cache_growth_of_the_600m_models_is_the_papers() {
    let growth = |toml: &str| -> f64 {
        cache_cost(&parse(toml)).iter().map(|stage| stage.growth_bytes_per_token(CacheDtype::F16)).sum()
    };
    assert_eq!(growth(include_str!("../../configs/model/flat-600m.toml")), 106_496.0);
    assert_eq!(growth(include_str!("../../configs/model/block-600m.toml")), 13_312.0);
    assert_eq!(growth(include_str!("../../configs/model/photon-600m.toml")), 8_320.0);
}

#[test]
fn windows_bound_every_cache_but_the_top() {
    let config = parse(include_str!("../../configs/model/photon-3l-small.toml"));
    let growing: Vec<String> =
        cache_cost(&config).into_iter().filter(|cost| cost.max_entries.is_none()).map(|cost| cost.stage).collect();
    assert_eq!(growing, ["encoder 3"]);
    let ModelConfig::Photon(PhotonConfig { levels, .. }) = config else { panic!("a photon preset") };
    assert_eq!(levels.len(), 3);
}
