//! What gives way when memory runs short: budgets down to their floors, then storage, then the advance rule. After
//! that the session refuses. Each step is logged, and none touches the tokens.

use std::fmt;

use photon_core::advance::AdvanceRule;
use photon_core::cache::config::{Budget, Storage};
use photon_core::cache::kv_cache::KvCache;
use serde::Serialize;

use super::{Session, SessionError};

/// A step that made room.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Relief {
    /// Tokens of the longest row when it was taken.
    pub at_token: usize,
    /// What was done.
    pub step: ReliefStep,
    /// Bytes of all caches before.
    pub bytes_before: usize,
    /// Bytes of all caches after.
    pub bytes_after: usize,
}

/// What gave way.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReliefStep {
    /// The budget of a stage's caches.
    Budget {
        /// `encoder 1`, ...
        stage: String,
        /// What is left of it.
        budget: Budget,
    },
    /// The storage of a stage's caches.
    Storage {
        /// `encoder 1`, ...
        stage: String,
        /// How keys are stored now.
        keys: Storage,
        /// How values are stored now.
        values: Storage,
    },
    /// The advance rule.
    Advance {
        /// The new one.
        rule: AdvanceRule,
    },
}

impl fmt::Display for Relief {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at_token, step, bytes_before, bytes_after } = self;
        write!(f, "memory is short at token {at_token}: ")?;
        match step {
            ReliefStep::Budget { stage, budget } => write!(f, "{stage} keeps {budget:?}")?,
            ReliefStep::Storage { stage, keys, values } => {
                write!(f, "{stage} stores keys as {keys}, values as {values}")?;
            }
            ReliefStep::Advance { rule } => write!(f, "tokens advance by the rule {rule}")?,
        }
        write!(f, "; caches {bytes_before} -> {bytes_after} bytes")
    }
}

impl Session<'_> {
    /// Makes room for the next tokens of every row, as many as fit of `n_wanted`; returns how many do.
    pub(super) fn make_room(&mut self, n_wanted: usize, taken_tokens: usize) -> Result<usize, SessionError> {
        let Some(budget_bytes) = self.plan.memory_budget_bytes else { return Ok(n_wanted) };
        let config = self.model.config();
        loop {
            // A shorter piece costs nothing but time.
            let halves = std::iter::successors(Some(n_wanted), |&n| (n > 1).then_some(n / 2));
            for n_new in halves {
                if self.state.bytes_after(&config, n_new) <= budget_bytes {
                    return Ok(n_new);
                }
            }
            if !self.relieve() {
                return Err(SessionError::OverBudget {
                    held_bytes: self.state.bytes(),
                    needed_bytes: self.state.bytes_after(&config, 1),
                    budget_bytes,
                    taken_tokens,
                });
            }
        }
    }

    /// Takes the next step that makes room, in all stages that can take it; whether there was any.
    fn relieve(&mut self) -> bool {
        let n_before = self.reliefs.len();
        let steps: [fn(&mut Self); 3] = [Self::lower_budgets, Self::lighten_storage, Self::lighten_rule];
        steps.into_iter().any(|step| {
            step(self);
            self.reliefs.len() > n_before
        })
    }

    fn lower_budgets(&mut self) {
        self.for_each_stage(|stage, caches| {
            let config = caches.first()?.config();
            let budget = config.policy.ranking()?.budget().lowered(config.floor?)?;
            caches.iter_mut().for_each(|cache| cache.set_budget(budget));
            Some(ReliefStep::Budget { stage, budget })
        });
    }

    fn lighten_storage(&mut self) {
        self.for_each_stage(|stage, caches| {
            let config = caches.first()?.config();
            let lighter = |storage: Storage| storage.lighter().filter(|&lighter| lighter <= config.lightest);
            let (keys, values) = (lighter(config.keys), lighter(config.values));
            if keys.is_none() && values.is_none() {
                return None;
            }
            let (keys, values) = (keys.unwrap_or(config.keys), values.unwrap_or(config.values));
            caches.iter_mut().for_each(|cache| cache.set_storage(keys, values));
            Some(ReliefStep::Storage { stage, keys, values })
        });
    }

    fn lighten_rule(&mut self) {
        let is_lightest = self.state.advance_rule() == AdvanceRule::Recursive;
        // With one level, or none, there is nothing below the top to do without.
        if is_lightest || self.model.hierarchy().is_none_or(|config| config.n_levels() < 2) {
            return;
        }
        let bytes_before = self.state.bytes();
        let rule = AdvanceRule::Recursive;
        if self.state.switch_rule(rule).is_ok() {
            self.log(ReliefStep::Advance { rule }, bytes_before);
        }
    }

    fn for_each_stage(&mut self, mut relieve: impl FnMut(String, &mut [KvCache]) -> Option<ReliefStep>) {
        for index in 0..self.state.caches().len() {
            let bytes_before = self.state.bytes();
            let (stage, caches) = self.state.caches_mut().swap_remove(index);
            if let Some(step) = relieve(stage.to_string(), caches) {
                self.log(step, bytes_before);
            }
        }
    }

    fn log(&mut self, step: ReliefStep, bytes_before: usize) {
        let at_token = self.state.n_tokens().iter().copied().max().unwrap_or(0);
        self.reliefs.push(Relief { at_token, step, bytes_before, bytes_after: self.state.bytes() });
    }
}
