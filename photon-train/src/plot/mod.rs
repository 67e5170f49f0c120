//! Charts as SVG, and pages of them, in one file that needs nothing beside it.
//!
//! ```text
//! axis     from numbers to places, round numbers beside them
//! chart    series over two axes as SVG
//! page     tables and charts as HTML, with values under the pointer
//! metrics  the metrics.jsonl of a run, read back
//! curves   which charts are drawn of runs
//! ```

mod axis;
mod chart;
mod curves;
mod metrics;
mod page;

pub use axis::{Axis, Scale, short};
pub use chart::{Chart, Mark, Series};
pub use curves::{Along, Smoothing, curves};
pub use metrics::{EvalPoint, MetricsError, RunMetrics, StepPoint};
pub use page::{Page, PageTable};
