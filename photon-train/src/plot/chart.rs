//! Series over two axes, as SVG.
//!
//! Colours are those of the style sheet of a [`super::Page`], so that they suit a light and a dark screen.

use std::fmt::Write;

use serde_json::{Value, json};

use super::axis::{Axis, Layout};

/// Colours in the style sheet.
const N_COLORS: usize = 8;
/// More points than this could not be told apart.
const MAX_POINTS: usize = 800;

const WIDTH: f64 = 640.0;
const PLOT_HEIGHT: f64 = 260.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 12.0;
const TITLE_HEIGHT: f64 = 30.0;
const LEGEND_ROW: f64 = 18.0;
const BELOW: f64 = 42.0;
/// Of the text of a legend, a little more than it mostly is.
const CHAR_WIDTH: f64 = 6.6;
const SWATCH_WIDTH: f64 = 20.0;
const LEGEND_GAP: f64 = 16.0;

/// Numbers over numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// Along the bottom.
    pub x: Axis,
    /// Along the left side.
    pub y: Axis,
    /// What is drawn, the last on top.
    pub series: Vec<Series>,
}

/// Points that belong together.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// What the legend calls it; nothing: it is left out there, as one of those that share a colour.
    pub name: String,
    /// Which of the eight colours; beyond them they begin again with dashes.
    pub color: usize,
    /// How points are drawn.
    pub mark: Mark,
    /// In the order in which lines join them; those without a place on the axes are left out.
    pub points: Vec<(f64, f64)>,
}

/// How the points of a series are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A line through them; of very many, through the means of neighbours.
    Line,
    /// A dot for each.
    Dots,
    /// Both.
    LineAndDots,
}

/// A chart laid out on paper.
struct Paper {
    x: Layout,
    y: Layout,
    top: f64,
}

impl Chart {
    /// The chart as an `svg` element.
    pub fn svg(&self) -> String {
        let (legend, n_rows) = self.legend();
        let top = TITLE_HEIGHT + LEGEND_ROW * n_rows as f64 + 8.0;
        let height = top + PLOT_HEIGHT + BELOW;
        let title = escape(&self.title);
        let mut svg = format!(
            "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">\n\
             <text class=\"title\" x=\"{LEFT}\" y=\"20\">{title}</text>\n{legend}"
        );
        match self.paper(top) {
            None => {
                let middle = (LEFT + WIDTH - RIGHT) / 2.0;
                let _ = writeln!(svg, "<text class=\"empty\" x=\"{middle}\" y=\"{}\">no values</text>", top + 100.0);
            }
            Some(paper) => {
                self.write_axes(&mut svg, &paper);
                self.series.iter().for_each(|series| paper.write_series(&mut svg, series, &self.placed(series)));
            }
        }
        svg + "</svg>\n"
    }

    /// What the script of a page needs to show values under the pointer.
    pub(super) fn values(&self) -> Value {
        let Some(paper) = self.paper(0.0) else { return Value::Null };
        let series = |series: &Series| {
            let points = self.placed(series);
            let pixels: Vec<f64> = points.iter().map(|&(x, _)| tenth(paper.x_of(x))).collect();
            let value = |value: f64| super::short(value);
            let labels: Vec<[String; 2]> = points.iter().map(|&(x, y)| [value(x), value(y)]).collect();
            json!({ "name": series.name, "color": series.color % N_COLORS, "at": pixels, "values": labels })
        };
        let series: Vec<Value> = self.series.iter().map(series).collect();
        json!({ "x": self.x.label, "series": series })
    }

    /// The points that are drawn.
    fn placed(&self, series: &Series) -> Vec<(f64, f64)> {
        let has_place = |&(x, y): &(f64, f64)| self.x.scale.holds(x) && self.y.scale.holds(y);
        let points: Vec<(f64, f64)> = series.points.iter().copied().filter(has_place).collect();
        match series.mark {
            Mark::Line => thinned(&points),
            Mark::Dots | Mark::LineAndDots => points,
        }
    }

    fn paper(&self, top: f64) -> Option<Paper> {
        let points: Vec<(f64, f64)> = self.series.iter().flat_map(|series| self.placed(series)).collect();
        let x = Layout::of(self.x.scale, points.iter().map(|point| point.0))?;
        let y = Layout::of(self.y.scale, points.iter().map(|point| point.1))?.widened(0.04);
        let has_dots = self.series.iter().any(|series| series.mark != Mark::Line);
        Some(Paper { x: if has_dots { x.widened(0.01) } else { x }, y, top })
    }

    /// The legend, and how many rows it takes.
    fn legend(&self) -> (String, usize) {
        let (mut svg, mut x, mut row) = (String::new(), LEFT, 0);
        for series in self.series.iter().filter(|series| !series.name.is_empty()) {
            let width = SWATCH_WIDTH + CHAR_WIDTH * series.name.chars().count() as f64;
            if x > LEFT && x + width > WIDTH - RIGHT {
                (x, row) = (LEFT, row + 1);
            }
            let y = TITLE_HEIGHT + LEGEND_ROW * (row as f64 + 0.5);
            let class = series.class();
            let (middle, end, text) = (x + 7.0, x + 14.0, x + SWATCH_WIDTH);
            if series.mark != Mark::Dots {
                let _ = write!(svg, "<path class=\"line {class}\" d=\"M{x:.1} {y}H{end:.1}\"/>");
            }
            if series.mark != Mark::Line {
                let _ = write!(svg, "<circle class=\"dot {class}\" cx=\"{middle:.1}\" cy=\"{y}\" r=\"3.5\"/>");
            }
            let _ = writeln!(svg, "<text x=\"{text:.1}\" y=\"{}\">{}</text>", y + 4.0, escape(&series.name));
            x += width + LEGEND_GAP;
        }
        (svg, if self.series.is_empty() { 0 } else { row + 1 })
    }

    fn write_axes(&self, svg: &mut String, paper: &Paper) {
        let (right, bottom) = (WIDTH - RIGHT, paper.top + PLOT_HEIGHT);
        for (value, label) in paper.y.ticks(6) {
            let y = tenth(paper.y_of(value));
            let (text_x, text_y) = (LEFT - 6.0, y + 4.0);
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {y}H{right}\"/><text class=\"tick y\" x=\"{text_x}\" y=\"{text_y}\">{label}</text>"
            );
        }
        for (value, label) in paper.x.ticks(7) {
            let (x, text_y) = (tenth(paper.x_of(value)), bottom + 16.0);
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{x} {}V{bottom}\"/><text class=\"tick x\" x=\"{x}\" y=\"{text_y}\">{label}</text>",
                paper.top
            );
        }
        let (middle, under) = ((LEFT + right) / 2.0, bottom + 34.0);
        let (x_label, y_label) = (escape(&self.x.label), escape(&self.y.label));
        let centre = paper.top + PLOT_HEIGHT / 2.0;
        let _ = writeln!(
            svg,
            "<path class=\"axis\" d=\"M{LEFT} {}V{bottom}H{right}\"/>\
             <text class=\"label\" x=\"{middle}\" y=\"{under}\">{x_label}</text>\
             <text class=\"label\" transform=\"translate(12 {centre}) rotate(-90)\">{y_label}</text>",
            paper.top
        );
    }
}

impl Series {
    fn class(&self) -> String {
        let dashes = if self.color >= N_COLORS { " dashed" } else { "" };
        format!("s{}{dashes}", self.color % N_COLORS)
    }
}

impl Paper {
    fn x_of(&self, value: f64) -> f64 {
        LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT)
    }

    fn y_of(&self, value: f64) -> f64 {
        self.top + (1.0 - self.y.place(value)) * PLOT_HEIGHT
    }

    fn write_series(&self, svg: &mut String, series: &Series, points: &[(f64, f64)]) {
        let class = series.class();
        let at: Vec<(f64, f64)> = points.iter().map(|&(x, y)| (tenth(self.x_of(x)), tenth(self.y_of(y)))).collect();
        if series.mark != Mark::Dots && at.len() > 1 {
            let path: Vec<String> = at.iter().map(|(x, y)| format!("{x},{y}")).collect();
            let _ = writeln!(svg, "<polyline class=\"line {class}\" points=\"{}\"/>", path.join(" "));
        }
        // A line of one point could not be seen.
        if series.mark != Mark::Line || at.len() == 1 {
            for (x, y) in at {
                let _ = writeln!(svg, "<circle class=\"dot {class}\" cx=\"{x}\" cy=\"{y}\" r=\"3.5\"/>");
            }
        }
    }
}

/// Few enough points to draw: means of neighbours where there are more.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let group = points.len().div_ceil(MAX_POINTS).max(1);
    let mean = |points: &[(f64, f64)]| {
        let n = points.len() as f64;
        (points.iter().map(|point| point.0).sum::<f64>() / n, points.iter().map(|point| point.1).sum::<f64>() / n)
    };
    points.chunks(group).map(mean).collect()
}

fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// A text as it stands in HTML and SVG.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: Vec<Series>) -> Chart {
        Chart { title: "a < b".into(), x: Axis::linear("steps"), y: Axis::log("norm"), series }
    }

    fn series(mark: Mark, points: &[(f64, f64)]) -> Series {
        Series { name: "x & y".into(), color: 9, mark, points: points.to_vec() }
    }

    #[test]
    fn points_lie_where_the_axes_say() {
        let svg = chart(vec![series(Mark::Line, &[(0.0, 1.0), (5.0, 10.0), (10.0, 100.0), (11.0, 0.0)])]).svg();
        // The ends of the plot are 58 and 628, and the middle of 1 and 100 lies in the middle of its height. What has
        // no logarithm has no place.
        assert!(svg.contains("points=\"58,306.4 343,186 628,65.6\""), "{svg}");
        assert!(svg.contains("line s1 dashed"), "{svg}");
        assert!(svg.contains(">a &lt; b</text>") && svg.contains(">x &amp; y</text>"), "{svg}");
    }

    #[test]
    fn a_point_alone_is_seen_and_nothing_says_so() {
        let svg = |mark, points: &[(f64, f64)]| chart(vec![series(mark, points)]).svg();
        // The legend of a line has no dot.
        assert_eq!(svg(Mark::Line, &[(1.0, 1.0)]).matches("<circle").count(), 1);
        assert_eq!(svg(Mark::Dots, &[(1.0, 1.0), (2.0, 2.0)]).matches("<circle").count(), 1 + 2);
        assert!(svg(Mark::Line, &[(1.0, f64::NAN)]).contains("no values"));
    }

    #[test]
    fn many_points_become_few_with_the_same_mean() {
        let points: Vec<(f64, f64)> = (0..1600).map(|i| (f64::from(i), f64::from(i % 2))).collect();
        let thin = thinned(&points);
        assert_eq!(thin.len(), 800);
        assert!(thin.iter().all(|point| point.1 == 0.5));
        assert_eq!((thin[0].0, thin[799].0), (0.5, 1598.5));
    }
}
