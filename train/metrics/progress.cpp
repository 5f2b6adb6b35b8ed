#include "train/metrics/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace topknot {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr int kBarWidth = 24;

std::string format(const char* pattern, double value) {
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, pattern, value);
  return buffer;
}

}  // namespace

Progress::Progress(ProgressOptions options) : options_(options), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  finish();
}

void Progress::step(std::int64_t step, double epoch, double loss, double lr, std::int64_t images,
                    double step_seconds) {
  if (step_seconds > 0) {
    // The first step pays for set-up and is left out of the average once there is a second one.
    const double share = step <= 2 ? 1.0 : 0.05;
    rate_ += share * (1.0 / step_seconds - rate_);
    image_rate_ += share * (static_cast<double>(images) / step_seconds - image_rate_);
  }
  since_drawn_ += step_seconds;
  const bool last = options_.total_steps > 0 && step >= options_.total_steps;
  if (options_.quiet) return;
  const bool due = terminal_ ? since_drawn_ >= kRedrawSeconds : step % std::max(1, options_.log_every) == 0;
  if (!due && !last) return;
  since_drawn_ = 0;
  const double left =
      options_.total_steps > 0 && rate_ > 0
          ? static_cast<double>(std::max<std::int64_t>(0, options_.total_steps - step)) / rate_
          : -1;
  const std::string line = progress_line(step, options_.total_steps, epoch, loss, lr, image_rate_, left);
  if (!terminal_) {
    std::fprintf(stderr, "%s\n", line.c_str());
    return;
  }
  std::string bar;
  if (options_.total_steps > 0) {
    const double done = std::min(1.0, static_cast<double>(step) / static_cast<double>(options_.total_steps));
    const int full = static_cast<int>(done * kBarWidth);
    bar = "[" + std::string(static_cast<std::size_t>(full), '=') +
          std::string(static_cast<std::size_t>(kBarWidth - full), ' ') + "] ";
  }
  std::fprintf(stderr, "\r\033[K%s%s", bar.c_str(), line.c_str());
  std::fflush(stderr);
  bar_shown_ = true;
}

void Progress::note(const std::string& text) {
  if (options_.quiet) return;
  clear_bar();
  std::fprintf(stderr, "%s\n", text.c_str());
}

void Progress::finish() {
  if (!bar_shown_) return;
  std::fprintf(stderr, "\n");
  bar_shown_ = false;
}

void Progress::clear_bar() {
  if (!bar_shown_) return;
  std::fprintf(stderr, "\r\033[K");
  bar_shown_ = false;
}

std::string format_duration(double seconds) {
  const auto total = static_cast<std::int64_t>(std::llround(std::max(0.0, std::min(seconds, 3.6e9))));
  char buffer[48];
  if (total >= 3600) {
    std::snprintf(buffer, sizeof buffer, "%lld:%02lld:%02lld", static_cast<long long>(total / 3600),
                  static_cast<long long>(total / 60 % 60), static_cast<long long>(total % 60));
  } else {
    std::snprintf(buffer, sizeof buffer, "%lld:%02lld", static_cast<long long>(total / 60),
                  static_cast<long long>(total % 60));
  }
  return buffer;
}

std::string format_bytes(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  int unit = 0;
  while (std::fabs(bytes) >= 999.5 && unit < 5) bytes /= 1000, ++unit;
  return format(unit == 0 || bytes >= 99.95 ? "%.0f" : "%.3g", bytes) + " " + units[unit];
}

std::string progress_line(std::int64_t step, std::int64_t total, double epoch, double loss, double lr,
                          double images_per_second, double seconds_left) {
  std::string line = "step " + std::to_string(step);
  if (total > 0) line += "/" + std::to_string(total);
  line += "  epoch " + format("%.2f", epoch) + "  loss " + format("%.4f", loss) + "  lr " +
          format("%.4g", lr) + "  " + format(images_per_second < 99.5 ? "%.3g" : "%.0f", images_per_second) +
          " images/s";
  if (seconds_left >= 0) line += "  left " + format_duration(seconds_left);
  return line;
}

}  // namespace topknot
