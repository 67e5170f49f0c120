//! Generation by the light advance rules equals their definition, written out slowly; what they feed back, and what
//! they keep.

use std::collections::HashMap;

use burn::tensor::{Device, Tensor};
use photon_core::advance::{AdvanceError, AdvanceRule};
use photon_core::documents::Documents;
use photon_core::model::Model;
use photon_core::nn::span::Span;
use photon_core::photon::Photon;
use photon_core::state::{CacheUse, State};

use crate::support::{
    Case, VOCAB_SIZE, flat_cases, forward, ids, max_difference, mixed_case, photon_case, photon_cases, random_rows,
    rows_of, shaken,
};

/// f32, sums in another order, a few layers deep.
const TOLERANCE: f32 = 1e-4;

const LIGHT: [AdvanceRule; 2] = [AdvanceRule::Chunk, AdvanceRule::Recursive];

/// Tokens of a level-1 chunk in the small models.
const CHUNK_LEN: usize = 2;

const FULL: &str = "\"full\"";
const CHUNK_LOCAL: &str = "\"chunk\"";
const LOOKBACK: &str = "{ lookback = { chunks = 1 } }";

/// The definition of the rules, without caches: every vector from lists of all the units before it.
struct Oracle<'a> {
    photon: &'a Photon,
    tokens: &'a [u32],
    /// By which rule each token was taken up.
    rules: &'a [AdvanceRule],
    /// By level and index, `[1, 1, D]`; kept because levels ask for them again and again.
    units: HashMap<(usize, usize), Tensor<3>>,
    emissions: HashMap<(usize, usize), Tensor<3>>,
}

impl<'a> Oracle<'a> {
    fn new(model: &'a Model, tokens: &'a [u32], rules: &'a [AdvanceRule]) -> Self {
        let Model::Photon(photon) = model else { panic!("a hierarchical model") };
        Self { photon, tokens, rules, units: HashMap::new(), emissions: HashMap::new() }
    }

    fn logits(&mut self, position: usize) -> Vec<f32> {
        let hidden = self.emission(0, position);
        rows_of(self.photon.head().forward(hidden).squeeze_dim(1)).remove(0)
    }

    /// Unit `index` of `level` as the decoder above reads it.
    fn unit(&mut self, level: usize, index: usize) -> Tensor<3> {
        if let Some(unit) = self.units.get(&(level, index)) {
            return unit.clone();
        }
        let unit = match level {
            0 => self.photon.decoder_embedding.forward(ids(&[vec![self.tokens[index]]], &self.device())),
            _ => self.upper_unit(level, index),
        };
        self.units.insert((level, index), unit.clone());
        unit
    }

    fn upper_unit(&mut self, level: usize, index: usize) -> Tensor<3> {
        let config = self.photon.config();
        let (is_top, chunk_len) = (level == config.n_levels(), config.levels[level - 1].chunk_len);
        let last_token = (index + 1) * config.tokens_per_unit(level) - 1;
        let encoder = &self.photon.encoders[level - 1];
        let end = (index + 1) * chunk_len;
        match self.rules[last_token] {
            AdvanceRule::Chunk if !is_top => encoder.chunker.forward(self.below(level, index * chunk_len, end)),
            AdvanceRule::Recursive if !is_top => self.emission(level, index),
            _ => {
                let chunks = encoder.chunker.forward(self.below(level, 0, end));
                encoder.forward(chunks, &Documents::whole_rows(1)).narrow(1, index, 1)
            }
        }
    }

    /// Units `start..end` below `level` as its chunker reads them.
    fn below(&mut self, level: usize, start: usize, end: usize) -> Tensor<3> {
        match level {
            1 => self.photon.encoder_embedding.forward(ids(&[self.tokens[start..end].to_vec()], &self.device())),
            _ => Tensor::cat((start..end).map(|index| self.unit(level - 1, index)).collect(), 1),
        }
    }

    /// `H^level` of unit `index`, by the decoder of the level above.
    fn emission(&mut self, level: usize, index: usize) -> Tensor<3> {
        if let Some(emission) = self.emissions.get(&(level, index)) {
            return emission.clone();
        }
        let config = self.photon.config();
        let (chunk_len, width) = (config.levels[level].chunk_len, config.width(level));
        let n_groups = index / chunk_len + 1;
        let conditioning = (0..n_groups).map(|group| self.conditioning(level + 1, group)).collect();
        let mut contents: Vec<Tensor<3>> = (0..index).map(|earlier| self.unit(level, earlier)).collect();
        // The forward takes whole chunks; what stands at the unit and after it is not seen.
        contents.push(Tensor::zeros([1, n_groups * chunk_len - index, width], &self.device()));
        let decoder = &self.photon.decoders[level];
        let prefixes = decoder.converter.forward(Tensor::cat(conditioning, 1));
        let emission =
            decoder.forward(prefixes, Tensor::cat(contents, 1), &Documents::whole_rows(1)).narrow(1, index, 1);
        self.emissions.insert((level, index), emission.clone());
        emission
    }

    /// What conditions chunk `group` under `level`.
    fn conditioning(&mut self, level: usize, group: usize) -> Tensor<3> {
        match group.checked_sub(1) {
            _ if level < self.photon.config().n_levels() => self.emission(level, group),
            Some(before) => self.unit(level, before),
            None => self.photon.start_latent.val().reshape([1, 1, self.photon.config().width(level)]),
        }
    }

    fn device(&self) -> Device {
        self.photon.start_latent.device()
    }
}

/// The rules of `n_tokens` tokens, of which `n_prompt` are a prompt.
fn after_prompt(n_prompt: usize, n_tokens: usize, rule: AdvanceRule) -> Vec<AdvanceRule> {
    (0..n_tokens).map(|token| if token < n_prompt { AdvanceRule::Hierarchical } else { rule }).collect()
}

/// Takes up `tokens`, the hierarchical ones in one call and the others one by one; returns the logits of every
/// position from the first that no longer is hierarchical.
fn generate(model: &Model, tokens: &[u32], rules: &[AdvanceRule]) -> (State, Vec<Vec<f32>>) {
    let n_prompt = rules.iter().take_while(|&&rule| rule == AdvanceRule::Hierarchical).count();
    let (mut state, mut newest) = model.begin(1);
    if n_prompt > 0 {
        newest = model.extend(&mut state, &[0], &[tokens[..n_prompt].to_vec()]);
    }
    let mut logits = rows_of(newest);
    for (&token, &rule) in tokens.iter().zip(rules).skip(n_prompt) {
        state.switch_rule(rule).unwrap();
        logits.extend(rows_of(model.extend(&mut state, &[0], &[vec![token]])));
    }
    (state, logits)
}

fn assert_defined(case: &Case, model: &Model, tokens: &[u32], rules: &[AdvanceRule]) {
    let (_, generated) = generate(model, tokens, rules);
    let first = tokens.len() + 1 - generated.len();
    let mut oracle = Oracle::new(model, tokens, rules);
    for (position, logits) in (first..).zip(&generated) {
        let difference = max_difference(logits, &oracle.logits(position));
        assert!(difference <= TOLERANCE, "{}, {rules:?}: position {position}: {difference}", case.name);
    }
}

#[test]
fn the_oracle_of_the_hierarchical_rule_is_the_training_forward() {
    for case in photon_cases() {
        let model = shaken(&case.config, &Device::flex());
        let tokens = random_rows(1, case.config.meta_chunk_tokens() + 3, 20).remove(0);
        let expected = forward(&model, std::slice::from_ref(&tokens)).remove(0);
        let rules = after_prompt(tokens.len(), tokens.len(), AdvanceRule::Hierarchical);
        let mut oracle = Oracle::new(&model, &tokens, &rules);
        for (position, expected) in expected.iter().enumerate() {
            let difference = max_difference(&oracle.logits(position), expected);
            assert!(difference <= TOLERANCE, "{}: position {position}: {difference}", case.name);
        }
    }
}

#[test]
fn light_rules_after_any_prompt_are_what_their_definition_says() {
    for case in photon_cases() {
        let model = shaken(&case.config, &Device::flex());
        let meta_chunk = case.config.meta_chunk_tokens();
        for rule in LIGHT {
            for n_prompt in [0, 1, meta_chunk - 1, meta_chunk, meta_chunk + 3] {
                let n_tokens = n_prompt + meta_chunk + 4;
                let tokens = random_rows(1, n_tokens, 21).remove(0);
                assert_defined(&case, &model, &tokens, &after_prompt(n_prompt, n_tokens, rule));
            }
        }
    }
}

#[test]
fn a_rule_can_change_anywhere_in_the_middle_of_generation() {
    for case in photon_cases() {
        let model = shaken(&case.config, &Device::flex());
        let meta_chunk = case.config.meta_chunk_tokens();
        let n_tokens = 2 * meta_chunk + 5;
        let tokens = random_rows(1, n_tokens, 22).remove(0);
        for (n_exact, n_chunk) in [(0, 3), (meta_chunk + 1, 0), (5, meta_chunk), (meta_chunk, 1), (3, 2)] {
            let mut rules = after_prompt(n_exact, n_tokens, AdvanceRule::Recursive);
            rules[n_exact..n_exact + n_chunk].fill(AdvanceRule::Chunk);
            assert_defined(&case, &model, &tokens, &rules);
        }
    }
}

#[test]
fn rows_at_different_places_go_on_together_and_leave_without_a_trace() {
    for case in photon_cases() {
        let model = shaken(&case.config, &Device::flex());
        let meta_chunk = case.config.meta_chunk_tokens();
        let prompt_lens = [1, 4, 0, meta_chunk, 7];
        let n_steps = meta_chunk + 2;
        let rows = random_rows(prompt_lens.len(), prompt_lens.iter().max().unwrap() + n_steps, 23);
        for rule in LIGHT {
            let (mut state, _) = model.begin(rows.len());
            let with_prompt: Vec<usize> = (0..rows.len()).filter(|&row| prompt_lens[row] > 0).collect();
            let prompts: Vec<Vec<u32>> =
                with_prompt.iter().map(|&row| rows[row][..prompt_lens[row]].to_vec()).collect();
            model.extend(&mut state, &with_prompt, &prompts);
            state.switch_rule(rule).unwrap();
            let mut alive: Vec<usize> = (0..rows.len()).collect();
            let mut logits = Vec::new();
            for step in 0..n_steps {
                if step == n_steps / 2 {
                    state.select_rows(&[3, 0, 4]);
                    alive = vec![3, 0, 4];
                }
                let next: Vec<Vec<u32>> = alive.iter().map(|&row| vec![rows[row][prompt_lens[row] + step]]).collect();
                let places: Vec<usize> = (0..alive.len()).collect();
                logits.push((alive.clone(), rows_of(model.extend(&mut state, &places, &next))));
            }
            for (row, n_prompt) in prompt_lens.into_iter().enumerate() {
                let tokens = &rows[row][..n_prompt + n_steps];
                let rules = after_prompt(n_prompt, tokens.len(), rule);
                let mut oracle = Oracle::new(&model, tokens, &rules);
                for (step, (alive, logits)) in logits.iter().enumerate() {
                    let Some(place) = alive.iter().position(|&alive| alive == row) else { continue };
                    let difference = max_difference(&logits[place], &oracle.logits(n_prompt + step + 1));
                    assert!(difference <= TOLERANCE, "{}, {rule}: row {row}, step {step}: {difference}", case.name);
                }
            }
        }
    }
}

#[test]
fn a_light_rule_does_not_care_how_tokens_are_cut_into_calls() {
    for case in photon_cases() {
        let model = shaken(&case.config, &Device::flex());
        let n_tokens = 2 * case.config.meta_chunk_tokens() + 2;
        let tokens = random_rows(1, n_tokens, 24).remove(0);
        for rule in LIGHT {
            let (_, one_by_one) = generate(&model, &tokens, &after_prompt(3, n_tokens, rule));
            for piece_len in [2, 5, n_tokens] {
                let (mut state, _) = model.begin(1);
                model.extend(&mut state, &[0], &[tokens[..3].to_vec()]);
                state.switch_rule(rule).unwrap();
                let pieces = tokens[3..].chunks(piece_len).map(<[u32]>::to_vec);
                let logits = pieces.map(|piece| rows_of(model.extend(&mut state, &[0], &[piece]))).last();
                assert_eq!(logits.unwrap()[0], one_by_one[n_tokens - 3], "{}, {rule}", case.name);
            }
        }
    }
}

#[test]
fn with_one_level_all_rules_are_the_same() {
    for case in photon_cases().into_iter().filter(|case| case.config.meta_chunk_tokens() == 2) {
        let model = shaken(&case.config, &Device::flex());
        let tokens = random_rows(1, 13, 25).remove(0);
        let rules = |rule| after_prompt(3, tokens.len(), rule);
        let (mut state, _) = model.begin(1);
        let mut exact = rows_of(model.extend(&mut state, &[0], &[tokens[..3].to_vec()]));
        exact.extend(tokens[3..].iter().flat_map(|&token| rows_of(model.extend(&mut state, &[0], &[vec![token]]))));
        for rule in LIGHT {
            let (light_state, light) = generate(&model, &tokens, &rules(rule));
            assert_eq!(light, exact, "{}, {rule}", case.name);
            let held = |state: &State| -> Vec<CacheUse> {
                state.cache_use().into_iter().map(|stage| CacheUse { storing_secs: 0.0, ..stage }).collect()
            };
            assert_eq!(held(&light_state), held(&state), "{}, {rule}", case.name);
        }
    }
}

/// Which level-1 chunks have logits that move, bit by bit, when generated token `changed` is another one.
fn moved_chunks(case: &Case, rule: AdvanceRule, n_prompt: usize, n_tokens: usize, changed: usize) -> Vec<usize> {
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(1, n_tokens, 26).remove(0);
    let mut other = tokens.clone();
    other[changed] = (other[changed] + 1) % VOCAB_SIZE as u32;
    let logits = |tokens: &[u32]| -> Vec<Vec<f32>> {
        let (mut state, first) = model.begin(1);
        let mut logits = rows_of(first);
        for (position, &token) in tokens.iter().enumerate() {
            if position == n_prompt {
                state.switch_rule(rule).unwrap();
            }
            logits.extend(rows_of(model.extend(&mut state, &[0], &[vec![token]])));
        }
        logits
    };
    let (before, after) = (logits(&tokens), logits(&other));
    let mut chunks: Vec<usize> = (0..=n_tokens).filter(|&i| before[i] != after[i]).map(|i| i / CHUNK_LEN).collect();
    chunks.dedup();
    chunks
}

#[test]
fn under_the_recursive_rule_a_generated_token_reaches_no_later_chunk() {
    let kinds_above = ["chunk", "lookback", "stream"];
    let mixed = kinds_above.map(|above| mixed_case(["chunk", above, "chunk", above]));
    for case in (2..=4).map(|n_levels| photon_case(n_levels, FULL, CHUNK_LOCAL)).chain(mixed) {
        let n_tokens = 2 * case.config.meta_chunk_tokens() + 4;
        for changed in [3, 4, 5] {
            let moved = |rule| moved_chunks(&case, rule, 3, n_tokens, changed);
            let own = changed / CHUNK_LEN;
            // Within its chunk only the logits after it can move, and the last token of a chunk has none.
            let own_chunk = if changed % CHUNK_LEN == 0 { vec![own] } else { vec![] };
            assert_eq!(moved(AdvanceRule::Recursive), own_chunk, "{}: token {changed}", case.name);
            for rule in [AdvanceRule::Chunk, AdvanceRule::Hierarchical] {
                let fed_back = moved(rule).into_iter().any(|chunk| chunk > own + 1);
                assert!(fed_back, "{}, {rule}: token {changed}", case.name);
            }
        }
    }
}

/// Two layers that each see one chunk back carry a token two chunks on.
#[test]
fn under_the_recursive_rule_a_token_decoder_that_looks_back_carries_tokens_as_far_as_its_layers_see() {
    let mixed = mixed_case(["lookback", "chunk", "stream", "chunk"]);
    for case in (2..=4).map(|n_levels| photon_case(n_levels, FULL, LOOKBACK)).chain([mixed]) {
        let n_tokens = 2 * case.config.meta_chunk_tokens() + 4;
        for (changed, chunks) in [(3, vec![2, 3]), (4, vec![2, 3, 4])] {
            let moved = moved_chunks(&case, AdvanceRule::Recursive, 3, n_tokens, changed);
            assert_eq!(moved, chunks, "{}: token {changed}", case.name);
        }
    }
}

#[test]
fn encoders_below_the_top_hold_no_bytes_after_the_switch() {
    for case in photon_cases() {
        let model = shaken(&case.config, &Device::flex());
        let config = model.hierarchy().unwrap();
        let (meta_chunk, top) = (config.meta_chunk_tokens(), format!("encoder {}", config.n_levels()));
        for rule in LIGHT {
            let (mut state, _) = model.begin(2);
            model.extend(&mut state, &[0, 1], &random_rows(2, meta_chunk + 1, 27));
            state.switch_rule(rule).unwrap();
            for tokens in random_rows(5 * meta_chunk, 2, 28) {
                let next: Vec<Vec<u32>> = tokens.into_iter().map(|token| vec![token]).collect();
                for stage in state.cache_use() {
                    let is_kept = stage.stage.starts_with("decoder") || stage.stage == top;
                    assert_eq!(stage.allocated_bytes > 0, is_kept, "{}, {rule}: {}", case.name, stage.stage);
                }
                model.extend(&mut state, &[0, 1], &next);
            }
            let n_entries = state.cache_use().iter().find(|stage| stage.stage == top).unwrap().entries;
            let span = config.encoder_spec(config.n_levels()).span;
            // A strided cache lets entries go by the block.
            let n_most = if matches!(span, Span::Strided { .. }) { 6 } else { span.live_entries(6) };
            let goes_on = (span.live_entries(6)..=n_most).contains(&n_entries);
            assert!(goes_on, "{}, {rule}: the top goes on, with {n_entries}", case.name);
        }
    }
}

#[test]
fn there_is_no_way_back_from_a_light_rule() {
    use AdvanceRule::{Chunk, Hierarchical, Recursive};
    let model = shaken(&photon_case(2, FULL, CHUNK_LOCAL).config, &Device::flex());
    let (mut state, _) = model.begin(1);
    for rule in [Hierarchical, Hierarchical, Chunk, Chunk, Recursive, Recursive] {
        assert_eq!(state.switch_rule(rule), Ok(()));
        assert_eq!(state.advance_rule(), rule);
    }
    for wanted in [Hierarchical, Chunk] {
        let error = AdvanceError::NoWayBack { current: Recursive, wanted };
        assert_eq!(state.switch_rule(wanted), Err(error));
        assert_eq!(state.advance_rule(), Recursive);
    }
}

#[test]
fn a_flat_model_has_the_hierarchical_rule_only() {
    for case in flat_cases() {
        let (mut state, _) = shaken(&case.config, &Device::flex()).begin(1);
        assert_eq!(state.switch_rule(AdvanceRule::Hierarchical), Ok(()));
        for wanted in LIGHT {
            let error = state.switch_rule(wanted).unwrap_err();
            assert_eq!(error, AdvanceError::Flat { wanted });
            assert!(error.to_string().contains("flat"), "{error}");
        }
        assert_eq!(state.advance_rule(), AdvanceRule::Hierarchical);
    }
}

#[test]
fn rules_are_written_as_in_the_documentation() {
    for (rule, name) in [(AdvanceRule::Hierarchical, "hierarchical"), (LIGHT[0], "chunk"), (LIGHT[1], "recursive")] {
        assert_eq!(serde_json::to_value(rule).unwrap(), name);
        assert_eq!(rule.to_string(), name);
    }
}
