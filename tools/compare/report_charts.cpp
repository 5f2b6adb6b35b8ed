#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <set>
#include <unordered_map>

#include "nn/base/check.h"
#include "tools/compare/compare.h"

namespace topknot {
namespace {

constexpr std::size_t kMeanPoints = 260, kRawPoints = 420;
constexpr double kThin = 1.1;  // the line of an incomplete run
constexpr const char* kQualityDescription =
    "Test results of each method against training time, epoch and step";
constexpr const char* kEpochsDescription = "Test results of each method against the epoch";

enum Axis { kStep, kEpoch, kTime, kAxes };
using Axes = std::vector<Axis>;                  // of panels from left to right
const Axes kEveryAxis = {kTime, kEpoch, kStep};  // what a user waits for comes first

// One quantity of a run or of a method's mean, with all three axes.
struct Curve {
  std::vector<std::array<double, kAxes>> at;
  std::vector<double> value, deviation;

  std::vector<Point> points(Axis axis, double deviations = 0) const {
    std::vector<Point> result;
    for (std::size_t i = 0; i < at.size(); ++i)
      result.push_back({at[i][axis], value[i] + (deviations == 0 ? 0 : deviations * deviation[i])});
    return result;
  }
  void add(std::int64_t step, double epoch, double time, double y) {
    at.push_back({static_cast<double>(step), epoch, time});
    value.push_back(y);
    deviation.push_back(0);
  }
  void smooth_values() {
    const auto window = std::max<std::size_t>(1, value.size() / 40);
    const auto smoothed = smooth(points(kStep), window);
    for (std::size_t i = 0; i < value.size(); ++i) value[i] = smoothed[i].y;
  }
};

// Mean over runs at the steps that all of them have.
Curve mean_curve(const std::vector<Curve>& curves) {
  if (curves.size() == 1) return curves[0];
  Curve result;
  std::vector<std::unordered_map<std::int64_t, std::size_t>> places(curves.size());
  for (std::size_t c = 0; c < curves.size(); ++c)
    for (std::size_t i = 0; i < curves[c].at.size(); ++i)
      places[c][static_cast<std::int64_t>(curves[c].at[i][kStep])] = i;
  for (const auto& place : curves[0].at) {
    const auto step = static_cast<std::int64_t>(place[kStep]);
    std::vector<double> values, epochs, times;
    for (std::size_t c = 0; c < curves.size(); ++c)
      if (const auto it = places[c].find(step); it != places[c].end()) {
        values.push_back(curves[c].value[it->second]);
        epochs.push_back(curves[c].at[it->second][kEpoch]);
        times.push_back(curves[c].at[it->second][kTime]);
      }
    if (values.size() < curves.size()) continue;
    const Stat stat = stat_of(values);
    // If a run diverged, a mean of the others would hide it.
    const double mean = stat.count == static_cast<int>(values.size()) ? stat.mean : kAbsent;
    result.add(step, stat_of(epochs).mean, stat_of(times).mean, mean);
    result.deviation.back() = stat.deviation;
  }
  return result;
}

using CurveOf = std::function<Curve(const Run&)>;

Curve loss_of(const Run& run) {
  Curve curve;
  for (const auto& s : run.metrics.steps) curve.add(s.step, s.epoch, s.time_s, s.loss);
  return curve;
}

Curve smooth_loss_of(const Run& run) {
  Curve curve = loss_of(run);
  curve.smooth_values();
  return curve;
}

Curve bytes_of(const Run& run) {
  Curve curve;
  for (std::size_t i = 0; i < run.metrics.steps.size(); ++i) {
    const auto& s = run.metrics.steps[i];
    curve.add(s.step, s.epoch, s.time_s, run.sent_so_far[i]);
  }
  return curve;
}

Curve quality_of(const Run& run) {
  Curve curve;
  for (const auto& e : run.metrics.evals) curve.add(e.step, e.epoch, e.time_s, run.metric.value(e.test));
  return curve;
}

struct Drawn {
  std::size_t method;
  Curve mean;
  bool incomplete = false;
  std::string title;
};

// The mean of each method's complete runs, and each incomplete run by itself.
std::vector<Drawn> draw(const Comparison& c, const CurveOf& curve_of) {
  std::vector<Drawn> drawn;
  for (std::size_t m = 0; m < c.methods.size(); ++m) {
    const Method& method = c.methods[m];
    std::vector<Curve> complete;
    for (const auto i : method.runs) {
      const Run& run = c.runs[i];
      if (run.complete()) {
        complete.push_back(curve_of(run));
      } else {
        drawn.push_back({m, curve_of(run), true,
                         fmt::format("{}, seed {}, incomplete", method.name, run.config.text("seed"))});
      }
    }
    if (!complete.empty())
      drawn.push_back(
          {m, mean_curve(complete), false,
           method.name + (complete.size() > 1 ? fmt::format(", mean of {}", complete.size()) : "")});
  }
  drawn.erase(std::remove_if(drawn.begin(), drawn.end(), [](const Drawn& d) { return d.mean.at.empty(); }),
              drawn.end());
  return drawn;
}

struct Range {
  double lo = kAbsent, hi = kAbsent;
  void include(double v) {
    if (!std::isfinite(v)) return;
    lo = std::isnan(lo) ? v : std::min(lo, v);
    hi = std::isnan(hi) ? v : std::max(hi, v);
  }
};

Range value_range(const std::vector<Drawn>& drawn) {
  Range range;
  for (const auto& d : drawn)
    for (std::size_t i = 0; i < d.mean.value.size(); ++i) {
      range.include(d.mean.value[i] - d.mean.deviation[i]);
      range.include(d.mean.value[i] + d.mean.deviation[i]);
    }
  return range;
}

Scale x_scale(const Comparison& c, const std::vector<Drawn>& drawn, Axis axis, double& unit) {
  Range range;
  for (const auto& d : drawn) range.include(d.mean.at.back()[axis]);
  Scale scale;
  unit = 1;
  scale.label = axis == kStep ? "step" : "epoch";
  if (axis == kTime) {
    unit = range.hi < 240 ? 1 : range.hi < 4 * 3600 ? 60 : 3600;
    scale.label = std::string("training time (") + (unit == 1 ? "s" : unit == 60 ? "min" : "h") + ")";
    if (const std::string link = emulated_link(c.methods); !link.empty()) scale.label += "\n" + link;
  }
  scale.lo = 0;
  scale.hi = std::max(range.hi / unit, 1e-9);
  scale.ticks = linear_ticks(scale.lo, scale.hi, 5, Unit::plain);
  return scale;
}

Scale linear_scale(Range range, double from_zero_below, Unit unit, const std::string& label) {
  Scale scale;
  scale.label = label;
  scale.unit = unit;
  const double pad = 0.04 * std::max(range.hi - range.lo, 1e-3 * std::fabs(range.hi));
  scale.hi = range.hi + pad;
  scale.lo = range.lo >= 0 && range.lo < from_zero_below * range.hi ? 0 : range.lo - pad;
  if (!(scale.hi > scale.lo)) scale.hi = scale.lo + 1;
  scale.ticks = linear_ticks(scale.lo, scale.hi, 6, unit);
  return scale;
}

Scale log_scale(Range range, Unit unit, const std::string& label) {
  Scale scale;
  scale.label = label;
  scale.unit = unit;
  scale.logarithmic = true;
  scale.lo = range.lo / 1.15;
  scale.hi = range.hi * 1.15;
  scale.ticks = log_ticks(scale.lo, scale.hi, unit);
  return scale;
}

std::vector<Point> scaled(std::vector<Point> points, double unit) {
  for (Point& p : points) p.x /= unit;
  return points;
}

struct Style {
  bool dots = false;
  bool bands = true;
  std::vector<Drawn> raw;  // drawn faint below
};

std::vector<Panel> panels_of(const Comparison& c, const std::vector<Drawn>& drawn, const Scale& y,
                             const Style& style, const Axes& axes = kEveryAxis) {
  std::vector<Panel> panels;
  for (const Axis axis : axes) {
    Panel panel;
    double unit = 1;
    panel.x = x_scale(c, drawn, axis, unit);
    panel.y = y;
    for (const auto& d : style.raw)
      panel.lines.push_back({.points = scaled(thin_out(d.mean.points(axis), kRawPoints), unit),
                             .colour = c.styles[d.method].colour,
                             .width = 0.8,
                             .opacity = 0.3,
                             .dash = "",
                             .title = ""});
    for (const auto& d : drawn) {
      const auto thin = [&](double deviations) {
        return scaled(thin_out(d.mean.points(axis, deviations), kMeanPoints), unit);
      };
      const bool spread =
          std::any_of(d.mean.deviation.begin(), d.mean.deviation.end(), [](double v) { return v > 0; });
      if (style.bands && spread) panel.bands.push_back({thin(1), thin(-1), c.styles[d.method].colour});
      Line line = line_of(c.styles[d.method], d.title);
      line.points = thin(0);
      line.width = d.incomplete ? kThin : 2;
      line.dots = style.dots;
      line.cross_at_end = d.incomplete;
      panel.lines.push_back(std::move(line));
    }
    panels.push_back(std::move(panel));
  }
  return panels;
}

// Empty if nothing was evaluated. The first panel marks where the target is reached.
std::vector<Panel> quality_panels(const Comparison& c, const Axes& axes) {
  const auto drawn = draw(c, quality_of);
  Range range = value_range(drawn);
  if (std::isnan(range.lo)) return {};
  const bool target = !std::isnan(c.target);
  if (target) range.include(c.target);
  const bool share = c.metric.unit == "share";
  const std::string label = c.metric.title() + (share ? "" : " (" + c.metric.unit + ")");
  Scale y;
  if (share) {
    range.hi = std::min(range.hi, 1.0);
    y = linear_scale(range, 0.3, Unit::percent, label);
  } else if (range.lo > 0 && range.hi / range.lo > 60) {
    y = log_scale(range, Unit::plain, label);
  } else {
    y = linear_scale(range, 0.4, Unit::plain, label);
  }
  Style style;
  style.dots = true;
  auto panels = panels_of(c, drawn, y, style, axes);
  if (target)
    for (Panel& panel : panels) {
      panel.reference = c.target;
      panel.reference_label = "target " + value_text(c.metric, stat_of({c.target}));
    }
  if (target) {
    double unit = 1;
    x_scale(c, drawn, axes[0], unit);
    for (const Drawn& d : drawn) {
      if (d.incomplete) continue;
      for (std::size_t i = 0; i < d.mean.at.size(); ++i)
        if (reaches(c.metric, d.mean.value[i], c.target)) {
          panels[0].marks.push_back(
              {{d.mean.at[i][axes[0]] / unit, d.mean.value[i]}, c.styles[d.method].colour});
          break;
        }
    }
  }
  return panels;
}

// Methods that differ only in how much they send. Their dots have a shape that no other family of the
// compressor has, as long as there are shapes.
struct Family {
  std::string compressor, keys;  // "topk", " values=int8"
  LineStyle style;
  std::vector<const Method*> members;  // by the bits that they send
  std::string name() const { return compressor + keys; }
};

std::vector<Family> families_of(const Comparison& c) {
  static const std::set<std::string> amounts = {"compress.density", "compress.warmup", "compress.threshold",
                                                "compress.rank", "compress.levels"};
  std::vector<Family> families;
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    const Method& method = c.methods[i];
    if (!method.complete || !std::isfinite(method.last.mean) || !std::isfinite(method.bits)) continue;
    std::string keys;
    for (const DifferingKey& row : c.differing)
      if (!amounts.count(row.key) && tells_apart(c, row, i)) keys += brief_key(row, i);
    const auto known = std::find_if(families.begin(), families.end(), [&](const Family& f) {
      return f.compressor == method.compressor && f.keys == keys;
    });
    (known == families.end() ? families.emplace_back(Family{method.compressor, keys, {}, {}}) : *known)
        .members.push_back(&method);
  }
  std::vector<PlannedMethod> lines;
  for (const Family& family : families) lines.push_back({family.compressor, family.keys});
  const auto styles = line_styles(lines);
  std::map<std::string, std::size_t> before;  // families by compressor
  for (std::size_t i = 0; i < families.size(); ++i) {
    families[i].style = styles[i];
    families[i].style.marker = before[families[i].compressor]++ % kMarkers;
    std::stable_sort(families[i].members.begin(), families[i].members.end(),
                     [](const Method* a, const Method* b) { return a->bits < b->bits; });
  }
  return families;
}

std::vector<LegendEntry> legend_of(const std::vector<Family>& families) {
  std::vector<LegendEntry> legend;
  for (const Family& family : families) legend.push_back({family.name(), family.style});
  return legend;
}

// A point per method at its last value; a vertical line spans a deviation to either side. Empty if no
// complete run was evaluated and sent something.
std::vector<Panel> bits_panels(const Comparison& c, const std::vector<Family>& families) {
  Range bits, values;
  Panel panel;
  for (const Family& family : families) {
    Line line = line_of(family.style, family.name());
    line.dots = true;
    for (const Method* method : family.members) {
      const double x = method->bits, y = method->last.mean, spread = method->last.deviation;
      bits.include(x);
      values.include(y - spread);
      values.include(y + spread);
      line.points.push_back({x, y});
      if (spread > 0)
        panel.lines.push_back({.points = {{x, y - spread}, {x, y + spread}},
                               .colour = line.colour,
                               .width = 1,
                               .dash = "",
                               .title = ""});
    }
    panel.lines.push_back(std::move(line));
  }
  if (std::isnan(bits.lo)) return {};
  panel.x = log_scale(bits, Unit::plain, "bits that a rank sends per parameter and step");
  const bool share = c.metric.unit == "share";
  panel.y = linear_scale(values, 0, share ? Unit::percent : Unit::plain,
                         "last " + c.metric.title() + (share ? "" : " (" + c.metric.unit + ")"));
  return {panel};
}

std::string quality_picture(const Comparison& c, const Axes& axes, const char* description) {
  const auto panels = quality_panels(c, axes);
  if (panels.empty())
    throw UserError(has_times(c)
                        ? "--out: no run was evaluated, so there is nothing to draw"
                        : "--out: a table has no evaluations on the way to draw; .bits.svg draws it");
  std::vector<LegendEntry> legend;
  for (std::size_t i = 0; i < c.methods.size(); ++i) legend.push_back({c.methods[i].name, c.styles[i]});
  return stand_alone_plot(panels, legend, description);
}

constexpr const char* kBitsDescription =
    "Last test result of each method against the bits that a rank sends per parameter and step";

}  // namespace

std::string loss_chart(const Comparison& c) {
  const auto drawn = draw(c, smooth_loss_of);
  const Range range = value_range(drawn);
  if (std::isnan(range.lo)) return "";
  const bool wide = range.lo > 0 && range.hi / range.lo > 60;
  const Scale y = wide ? log_scale(range, Unit::plain, "train loss")
                       : linear_scale(range, 0.4, Unit::plain, "train loss");
  Style style;
  style.raw = draw(c, loss_of);
  return panel_figure(panels_of(c, drawn, y, style), "loss",
                      "Train loss of each method against training time, epoch and step");
}

std::string quality_chart(const Comparison& c) {
  const auto panels = quality_panels(c, kEveryAxis);
  return panels.empty() ? "" : panel_figure(panels, "quality", kQualityDescription);
}

std::string quality_svg(const Comparison& c) {
  return quality_picture(c, kEveryAxis, kQualityDescription);
}

std::string epochs_svg(const Comparison& c) {
  return quality_picture(c, {kEpoch}, kEpochsDescription);
}

std::string bits_chart(const Comparison& c) {
  const auto families = families_of(c);
  const auto panels = bits_panels(c, families);
  return panels.empty() ? ""
                        : legend_html(legend_of(families)) + panel_figure(panels, "bits", kBitsDescription);
}

std::string bits_svg(const Comparison& c) {
  const auto families = families_of(c);
  const auto panels = bits_panels(c, families);
  if (panels.empty())
    throw UserError("--out: no complete run was evaluated and sent something, so there is nothing to draw");
  return stand_alone_plot(panels, legend_of(families), kBitsDescription);
}

std::string bytes_chart(const Comparison& c) {
  const auto drawn = draw(c, bytes_of);
  Range range;
  for (const auto& d : drawn)
    for (const double v : d.mean.value)
      if (v > 0) range.include(v);
  if (std::isnan(range.lo)) return "";  // one rank sends nothing
  Style style;
  style.bands = false;
  const Scale y = log_scale(range, Unit::bytes, "sent by a rank");
  return panel_figure(panels_of(c, drawn, y, style), "bytes",
                      "Bytes sent by a rank under each method against training time, epoch and step");
}

}  // namespace topknot
