//! Configs for the tests of this module.

use std::path::Path;

use toml::Table;

use crate::config::RunConfig;

/// A run of two levels over bytes.
pub(super) const RUN: &str = "steps = 100\nseq_len = 64\nbatch_size = 2\n[data]\npaths = [\"a.txt\"]\n\
    [optimizer]\nwarmup_steps = 10\n[eval]\nevery_steps = 25\n[model]\narchitecture = \"photon\"\nvocab_size = 257\n\
    d_model = 64\n[[model.levels]]\nchunk_len = 4\nd_model = 64\nconverter = { prefix_len = 1 }\n\
    encoder = { n_layers = 2, n_heads = 2, d_ff = 128 }\ndecoder = { n_layers = 2, n_heads = 2, d_ff = 128 }\n\
    [[model.levels]]\nchunk_len = 2\nd_model = 64\nconverter = { prefix_len = 1 }\n\
    encoder = { n_layers = 1, n_heads = 2, d_ff = 64 }\ndecoder = { n_layers = 1, n_heads = 2, d_ff = 64 }\n";

pub(super) fn table(more: &str) -> Table {
    let mut table: Table = RUN.parse().expect("the config is TOML");
    let more: Table = more.parse().expect("so is what is added");
    for (key, value) in super::experiment::axes(&more) {
        photon_core::config_file::set_value(&mut table, &key, &value).expect("the key has a place");
    }
    table
}

pub(super) fn run(more: &str) -> RunConfig {
    RunConfig::from_table(table(more), Path::new("/here/run.toml")).unwrap_or_else(|error| panic!("{error}"))
}
