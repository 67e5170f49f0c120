//! The view on a screen of any size: what matters less is left out of a small one.

use indicatif::HumanDuration;
use photon_train::plot::short;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph, Wrap};

use super::view::{Mean, View};

const TRAIN: Color = Color::Cyan;
const HELD_OUT: Color = Color::Yellow;
/// Of the columns of numbers.
const NUMBERS_WIDTH: u16 = 34;

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame, view: &View, is_stopping: bool) {
    let area = frame.area();
    let n_sources = view.evaluation.as_ref().map_or(0, |evaluation| evaluation.sources.len());
    let n_norm_rows = view.stage_norms.len().max(n_sources) as u16;
    let norms_height = if area.height >= 24 { (n_norm_rows + 2).min(area.height / 3) } else { 0 };
    let texts_height = if area.height >= 16 { (area.height / 4).max(5) } else { 0 };
    let [head, progress, curves, norms, texts] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(norms_height),
        Constraint::Length(texts_height),
    ])
    .areas(area);
    draw_head(frame, head, view, is_stopping);
    draw_progress(frame, progress, view);

    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Length(NUMBERS_WIDTH)]).areas(curves);
    draw_curves(frame, left, view);
    draw_numbers(frame, right, view);

    let sources_width = if n_sources > 0 { NUMBERS_WIDTH } else { 0 };
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Length(sources_width)]).areas(norms);
    draw_norms(frame, left, view);
    draw_sources(frame, right, view);

    let [left, right] = Layout::horizontal([Constraint::Fill(3), Constraint::Fill(2)]).areas(texts);
    draw_sample(frame, left, view);
    draw_notices(frame, right, view);
}

fn draw_head(frame: &mut Frame, area: Rect, view: &View, is_stopping: bool) {
    let facts = &view.facts;
    let left = Line::from(vec![
        Span::raw("photon-train ").bold(),
        Span::raw(format!("{}  {}  {} parameters", facts.folder, facts.device, short(facts.parameters as f64))),
    ]);
    let right = match is_stopping {
        true => Line::from("stopping after this step and saving (Ctrl-C: at once)".bold().fg(HELD_OUT)),
        false => Line::from("q: stop and save".dim()),
    };
    let [left_area, right_area] =
        Layout::horizontal([Constraint::Fill(1), Constraint::Length(right.width() as u16)]).areas(area);
    frame.render_widget(left, left_area);
    frame.render_widget(right, right_area);
}

fn draw_progress(frame: &mut Frame, area: Rect, view: &View) {
    let (step, steps) = (view.step, view.facts.steps);
    let left = match view.time_left() {
        Some(left) => format!(", ETA {}", HumanDuration(left)),
        None => String::new(),
    };
    let label = format!("{step}/{steps} steps, {} gone{left}", HumanDuration(view.began.elapsed()));
    let ratio = (step as f64 / steps as f64).clamp(0.0, 1.0);
    let gauge = Gauge::default().ratio(ratio).label(label).use_unicode(true).gauge_style(Style::new().fg(TRAIN));
    frame.render_widget(gauge, area);
}

fn draw_curves(frame: &mut Frame, area: Rect, view: &View) {
    let title =
        Line::from(vec![" bits per byte: ".into(), "training".fg(TRAIN), ", ".into(), "held out ".fg(HELD_OUT)]);
    let block = Block::bordered().title(title);
    let points = || view.train_curve.points.iter().chain(&view.held_out).filter(|(_, bits)| bits.is_finite());
    let last_step = points().map(|point| point.0).fold(1.0, f64::max);
    // What a run begins with is far above all that follows: it may lie beyond the upper end.
    let later: Vec<f64> = points().filter(|point| point.0 >= 0.1 * last_step).map(|point| point.1).collect();
    let (low, high) =
        later.iter().fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), &bits| (low.min(bits), high.max(bits)));
    if later.is_empty() {
        return frame.render_widget(Paragraph::new("waiting for the first step").dim().block(block), area);
    }
    let margin = (0.05 * (high - low)).max(0.01);
    let (low, high) = ((low - margin).max(0.0), high + margin);
    let within = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
        points.iter().copied().filter(|(_, bits)| (low..=high).contains(bits)).collect()
    };
    let (train, held_out) = (within(&view.train_curve.points), within(&view.held_out));
    let datasets = vec![
        Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line).style(TRAIN).data(&train),
        Dataset::default().marker(Marker::Dot).graph_type(GraphType::Scatter).style(HELD_OUT).data(&held_out),
    ];
    let labels = |ends: [f64; 2]| [ends[0], (ends[0] + ends[1]) / 2.0, ends[1]];
    let x_labels = labels([0.0, last_step]).map(|step| short(step.round()));
    let y_labels = labels([low, high]).map(|bits| format!("{bits:.2}"));
    let chart = Chart::new(datasets)
        .block(block)
        .x_axis(Axis::default().bounds([0.0, last_step]).labels(x_labels).style(Style::new().dim()))
        .y_axis(Axis::default().bounds([low, high]).labels(y_labels).style(Style::new().dim()))
        .legend_position(None);
    frame.render_widget(chart, area);
}

fn draw_numbers(frame: &mut Frame, area: Rect, view: &View) {
    let mut rows: Vec<(&str, String)> = Vec::new();
    if let Some(last) = &view.last {
        rows.push(("loss", format!("{:.3} nats", view.loss_nats.value())));
        rows.push(("bits per byte", format!("{:.3}", view.bits_per_byte.value())));
        if let Some(evaluation) = &view.evaluation {
            rows.push(("held out", format!("{:.4}", evaluation.held_out.bits_per_byte)));
        }
        rows.extend(view.best_bits_per_byte.map(|best| ("best", format!("{best:.4}"))));
        rows.push(("gradient norm", format!("{:.3}", view.gradient_norm.value())));
        rows.push(("learning rate", format!("{:.3e}", last.learning_rate)));
        rows.push(("tokens", short(last.tokens as f64)));
        rows.push(("tokens/s", format!("{:.0}", view.tokens_per_sec.value())));
        if last.share_of_peak.is_some() {
            rows.push(("share of peak", format!("{:.1} %", 100.0 * view.share_of_peak.value())));
        }
        rows.extend(view.memory());
        if view.n_skipped > 0 {
            rows.push(("skipped", format!("{} updates", view.n_skipped)));
        }
    }
    let lines: Vec<Line> = rows.into_iter().map(|(name, value)| row(name, value)).collect();
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" now ")), area);
}

fn row(name: &str, value: String) -> Line<'static> {
    Line::from(vec![format!(" {name:<14} ").dim(), value.bold()])
}

/// A bar for each stage, the longest for the largest norm.
fn draw_norms(frame: &mut Frame, area: Rect, view: &View) {
    let largest = view.stage_norms.iter().map(|(_, norm)| norm.value()).fold(0.0, f64::max);
    let name_width = view.stage_norms.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    // The borders, a name, a number, and blanks between them.
    let bar_width = usize::from(area.width).saturating_sub(name_width + 16);
    let bar = |(name, norm): &(String, Mean)| {
        let share = if largest > 0.0 { norm.value() / largest } else { 0.0 };
        let eighths = (share * 8.0 * bar_width as f64).round() as usize;
        let rest = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8];
        let filled = "█".repeat(eighths / 8) + rest;
        Line::from(vec![
            format!(" {name:<name_width$} ").dim(),
            format!("{:>10} ", short(norm.value())).add_modifier(Modifier::BOLD),
            filled.fg(TRAIN),
        ])
    };
    let lines: Vec<Line> = view.stage_norms.iter().map(bar).collect();
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" gradient norm of each stage ")), area);
}

fn draw_sources(frame: &mut Frame, area: Rect, view: &View) {
    let sources = view.evaluation.iter().flat_map(|evaluation| &evaluation.sources);
    let lines: Vec<Line> =
        sources.map(|(name, held_out)| row(name, format!("{:.4}", held_out.bits_per_byte))).collect();
    let title = " held out by source ";
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(title)), area);
}

fn draw_sample(frame: &mut Frame, area: Rect, view: &View) {
    let title = match &view.evaluation {
        Some(evaluation) => format!(" sample after step {} ", evaluation.step),
        None => " sample ".into(),
    };
    let text = Text::raw(view.sample().unwrap_or_default());
    let text = Paragraph::new(text).wrap(Wrap { trim: false }).block(Block::bordered().title(title));
    frame.render_widget(text, area);
}

/// The newest first, because there may be more than there is room for.
fn draw_notices(frame: &mut Frame, area: Rect, view: &View) {
    let lines: Vec<Line> = view.notices.iter().rev().map(|notice| Line::raw(notice.as_str())).collect();
    let text = Paragraph::new(lines).wrap(Wrap { trim: false }).block(Block::bordered().title(" notices "));
    frame.render_widget(text, area);
}

#[cfg(test)]
mod tests {
    use photon_train::report::Observer;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::view::tests::{evaluation, facts, step};
    use super::*;

    fn screen(view: &View, width: u16, height: u16, is_stopping: bool) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, view, is_stopping)).unwrap();
        terminal.backend().to_string()
    }

    fn view_after(n_steps: u64) -> View {
        let mut view = View::new(facts(40));
        view.evaluation(&evaluation(0, 8.0));
        (1..=n_steps).for_each(|at| view.step(&step(at, 4.0)));
        view
    }

    #[test]
    fn the_screen_shows_where_the_run_stands() {
        let mut view = view_after(12);
        view.evaluation(&evaluation(12, 3.5));
        view.notice("warning: something");
        let screen = screen(&view, 120, 36, false);
        for text in [
            "runs/x  cpu  1.5M parameters",
            "q: stop and save",
            "12/40 steps",
            "bits per byte: training, held out",
            "bits per byte  4.000",
            "held out       3.5000",
            "best           3.5000",
            "learning rate  1.000e-3",
            "share of peak  25.0 %",
            "memory         1.00 MiB",
            "peak memory    3.00 MiB",
            "device memory  2.00 MiB",
            "encoder 1          3 ███",
            "head               0",
            "prose          3.5000",
            "sample after step 12",
            "The ·[2J whale",
            "warning: something",
        ] {
            assert!(screen.contains(text), "no {text:?} in\n{screen}");
        }
        assert!(screen.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "no curve in\n{screen}");
    }

    #[test]
    fn it_says_when_it_stops() {
        let screen = screen(&view_after(1), 120, 36, true);
        assert!(screen.contains("stopping after this step and saving") && !screen.contains("q: stop"), "{screen}");
    }

    #[test]
    fn it_fits_every_size() {
        let views = [View::new(facts(40)), view_after(1), view_after(600)];
        for view in &views {
            for (width, height) in (1..60).flat_map(|n| [(n, n), (2 * n, n), (150, n), (n, 50)]) {
                screen(view, width, height, width.is_multiple_of(2));
            }
        }
        assert!(screen(&views[2], 40, 4, false).contains("600/40 steps"));
    }
}
