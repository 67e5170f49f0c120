//! Errors as one line for a person.

use std::error::Error;

/// The message of an error, and of those of its causes that it does not tell itself.
pub fn error_text(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    enum Outer {
        #[error("cannot read a.txt: {source}")]
        Telling { source: io::Error },
        #[error("cannot read a.txt")]
        Silent { source: io::Error },
    }

    #[test]
    fn a_cause_is_told_once() {
        let source = || io::Error::other("disk on fire");
        assert_eq!(error_text(&Outer::Telling { source: source() }), "cannot read a.txt: disk on fire");
        assert_eq!(error_text(&Outer::Silent { source: source() }), "cannot read a.txt: disk on fire");
    }
}
