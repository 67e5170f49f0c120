//! Charts in one HTML file: nothing is loaded from elsewhere.

use std::fmt::Write;

use super::chart::{Chart, escape};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// A page of charts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Its heading.
    pub title: String,
    /// Lines below the heading.
    pub notes: Vec<String>,
    /// Below the notes.
    pub tables: Vec<PageTable>,
    /// As many beside each other as there is room for.
    pub charts: Vec<Chart>,
}

/// A table whose first column are names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTable {
    /// What it shows.
    pub title: String,
    /// Of the columns.
    pub header: Vec<String>,
    /// As long as the header, each.
    pub rows: Vec<Vec<String>>,
}

impl Page {
    /// The page as HTML.
    pub fn html(&self) -> String {
        let title = escape(&self.title);
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        );
        for note in &self.notes {
            let _ = writeln!(html, "<p>{}</p>", escape(note));
        }
        self.tables.iter().for_each(|table| table.write(&mut html));
        html += "<main>\n";
        for chart in &self.charts {
            // A name must not end the script.
            let values = chart.values().to_string().replace('<', "\\u003c");
            let _ = writeln!(
                html,
                "<figure>\n{}<script type=\"application/json\">{values}</script>\n</figure>",
                chart.svg()
            );
        }
        let _ = write!(html, "</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n");
        html
    }
}

impl PageTable {
    fn write(&self, html: &mut String) {
        let cells = |tag: &str, cells: &[String]| -> String {
            cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect()
        };
        let _ = writeln!(html, "<table>\n<caption>{}</caption>", escape(&self.title));
        let _ = writeln!(html, "<thead><tr>{}</tr></thead>\n<tbody>", cells("th", &self.header));
        for row in &self.rows {
            let _ = writeln!(html, "<tr>{}</tr>", cells("td", row));
        }
        *html += "</tbody>\n</table>\n";
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Axis, Mark, Series};
    use super::*;

    #[test]
    fn names_are_texts_whatever_they_hold() {
        let name = "</script><script>alert(1)</script>";
        let series =
            vec![Series { name: name.into(), color: 0, mark: Mark::Line, points: vec![(0.0, 1.0), (1.0, 2.0)] }];
        let (x, y) = (Axis::linear(name), Axis::linear(name));
        let chart = Chart { title: name.into(), x, y, series };
        let table = PageTable { title: name.into(), header: vec![name.into()], rows: vec![vec![name.into()]] };
        let html =
            Page { title: name.into(), notes: vec![name.into()], tables: vec![table], charts: vec![chart] }.html();
        assert!(!html.contains("alert(1)</script>"), "{html}");
        assert_eq!(html.matches("<script").count(), 2);
        // Nothing is fetched.
        assert!(!html.contains("http") && !html.contains(" src="), "{html}");
    }
}
