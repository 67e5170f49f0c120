//! A session: a model's state with a memory budget, to be gone on with, put aside, forked and cut back.
//!
//! ```text
//!  session      takes up tokens; snapshots, forks, goes back
//!   pressure    what gives way when memory runs short, step by step
//! ```
//!
//! A session is a value. The model is shared and never changed.

mod pressure;

use std::path::Path;

use burn::tensor::Tensor;
use photon_core::advance::AdvanceError;
use photon_core::infer_config::InferPlan;
use photon_core::model::Model;
use photon_core::snapshot::{self, SnapshotError};
use photon_core::state::{CacheUse, State, TruncateError};

pub use pressure::{Relief, ReliefStep};

/// Tokens of each row that go through the model at once, at most; the result does not depend on it.
const PIECE_TOKENS: usize = 256;

/// The same for all rows together, so that the memory of a prefill does not grow with the batch.
const BATCH_TOKENS: usize = 8192;

/// A state under way, for a batch of rows at places of their own.
#[derive(Clone, Debug)]
pub struct Session<'m> {
    model: &'m Model,
    plan: InferPlan,
    state: State,
    reliefs: Vec<Relief>,
}

/// Why a session refuses.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The memory budget holds no further token, whatever gives way.
    #[error(
        "the caches hold {held_bytes} of {budget_bytes} bytes and need {needed_bytes} for the next token, with nothing \
         left to give way; raise memory_budget_bytes, lower floors, or begin anew with less text \
         ({taken_tokens} tokens of each row of this call were taken up)"
    )]
    OverBudget {
        /// Bytes that the caches hold.
        held_bytes: usize,
        /// Bytes that they would hold after the next token.
        needed_bytes: usize,
        /// Bytes that they may hold.
        budget_bytes: usize,
        /// Tokens of the longest row that the call had taken up before.
        taken_tokens: usize,
    },
    /// The advance rule cannot be had.
    #[error(transparent)]
    Advance(#[from] AdvanceError),
    /// The state cannot go back.
    #[error(transparent)]
    Truncate(#[from] TruncateError),
    /// The snapshot cannot be written or read.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
}

impl<'m> Session<'m> {
    /// A session before any token, and the logits of the first of each row, `[B, V]`.
    ///
    /// # Panics
    ///
    /// If the plan is for another model.
    pub fn new(model: &'m Model, plan: &InferPlan, n_rows: usize) -> (Self, Tensor<2>) {
        let (state, logits) = model.begin_with(n_rows, plan);
        (Self { model, plan: plan.clone(), state, reliefs: Vec::new() }, logits)
    }

    /// A session that has taken up a prompt in each row and ended it; the logits of the token after each, `[B, V]`.
    ///
    /// # Errors
    ///
    /// If memory runs out, or the plan's advance rule cannot be had.
    ///
    /// # Panics
    ///
    /// If the plan is for another model.
    pub fn begin(model: &'m Model, plan: &InferPlan, prompts: &[Vec<u32>]) -> Result<(Self, Tensor<2>), SessionError> {
        let (mut session, first) = Self::new(model, plan, prompts.len());
        let mut logits = first.split(1, 0);
        let rows: Vec<usize> = (0..prompts.len()).filter(|&row| !prompts[row].is_empty()).collect();
        if !rows.is_empty() {
            let filled: Vec<Vec<u32>> = rows.iter().map(|&row| prompts[row].clone()).collect();
            let new = session.extend(&rows, &filled)?.split(1, 0);
            rows.into_iter().zip(new).for_each(|(row, new)| logits[row] = new);
        }
        session.end_prompt()?;
        Ok((session, Tensor::cat(logits, 0)))
    }

    /// Takes up tokens of `rows`, at least one for each, in pieces; returns the logits of the token after each row.
    ///
    /// # Shapes
    ///
    /// `b` lists of token ids `-> [b, V]`
    ///
    /// # Errors
    ///
    /// If memory runs out. The session then stands after the tokens that were taken up, and can go on.
    pub fn extend(&mut self, rows: &[usize], token_ids: &[Vec<u32>]) -> Result<Tensor<2>, SessionError> {
        let longest = token_ids.iter().map(Vec::len).max().unwrap_or(0);
        let mut logits: Vec<Option<Tensor<2>>> = vec![None; rows.len()];
        let mut taken = 0;
        while taken < longest {
            let members: Vec<usize> = (0..rows.len()).filter(|&index| token_ids[index].len() > taken).collect();
            let at_once = (BATCH_TOKENS / members.len()).clamp(1, PIECE_TOKENS);
            let piece_len = self.make_room(at_once.min(longest - taken), taken)?;
            let piece = |&index: &usize| {
                let ids = &token_ids[index];
                ids[taken..(taken + piece_len).min(ids.len())].to_vec()
            };
            let piece_rows: Vec<usize> = members.iter().map(|&index| rows[index]).collect();
            let pieces: Vec<Vec<u32>> = members.iter().map(piece).collect();
            let new = self.model.extend(&mut self.state, &piece_rows, &pieces).split(1, 0);
            members.into_iter().zip(new).for_each(|(index, new)| logits[index] = Some(new));
            taken += piece_len;
        }
        Ok(Tensor::cat(logits.into_iter().map(|row| row.expect("every row takes up a token")).collect(), 0))
    }

    /// Ends the prompt of all rows: what follows is generated, and goes by the plan's advance rule.
    ///
    /// # Errors
    ///
    /// If the rule cannot be had.
    pub fn end_prompt(&mut self) -> Result<(), SessionError> {
        Ok(self.state.end_prompt(&self.plan)?)
    }

    /// Keeps the given rows, in the given order; copies of one row share what it holds, where nothing is ever dropped.
    pub fn select_rows(&mut self, rows: &[usize]) {
        self.state.select_rows(rows);
    }

    /// A continuation of its own, sharing what the caches hold where nothing is ever dropped.
    pub fn fork(&mut self) -> Self {
        Self { model: self.model, plan: self.plan.clone(), state: self.state.fork(), reliefs: self.reliefs.clone() }
    }

    /// Goes back to the first `n_tokens` tokens of every row; see [`State::truncate`].
    ///
    /// # Errors
    ///
    /// If what was there then cannot be had any more; nothing is changed.
    pub fn truncate(&mut self, n_tokens: &[usize]) -> Result<(), SessionError> {
        Ok(self.state.truncate(&self.model.config(), n_tokens)?)
    }

    /// Begins anew with as many rows; returns the logits of the first token of each.
    pub fn reset(&mut self) -> Tensor<2> {
        let (session, logits) = Self::new(self.model, &self.plan, self.state.n_rows());
        *self = session;
        logits
    }

    /// What the session remembers, to come back to.
    pub fn snapshot(&self) -> State {
        self.state.clone()
    }

    /// Comes back to a snapshot of this session or of another with the same model and plan.
    pub fn restore(&mut self, snapshot: &State) {
        self.state = snapshot.clone();
    }

    /// Writes what the session remembers to a file.
    ///
    /// # Errors
    ///
    /// When the system refuses.
    pub fn save(&self, path: &Path) -> Result<(), SessionError> {
        Ok(snapshot::save(&self.state, self.model, path)?)
    }

    /// A session that goes on where one was saved.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, is damaged, or belongs to another model.
    pub fn load(model: &'m Model, plan: &InferPlan, path: &Path) -> Result<Self, SessionError> {
        let state = snapshot::load(path, model)?;
        Ok(Self { model, plan: plan.clone(), state, reliefs: Vec::new() })
    }

    /// The decode state.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// What the caches hold, stage by stage.
    pub fn cache_use(&self) -> Vec<CacheUse> {
        self.state.cache_use()
    }

    /// What has given way so far for want of memory, oldest first.
    pub fn reliefs(&self) -> &[Relief] {
        &self.reliefs
    }
}
