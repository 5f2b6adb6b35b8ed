#pragma once
// What a person sees while a run goes on, on standard error, from rank 0: a bar that redraws itself on a
// terminal, one plain line every `log_every` steps elsewhere, nothing under --quiet.

#include <cstdint>
#include <string>

namespace topknot {

struct ProgressOptions {
  std::int64_t total_steps = 0;  // 0: unknown
  int log_every = 10;
  bool quiet = false;
};

class Progress {
 public:
  explicit Progress(ProgressOptions options);  // asks whether standard error is a terminal
  ~Progress();                                 // ends the bar's line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `step` counts from 1; `images` over all ranks; `step_seconds` this step's, for the throughput (moving
  // average) and the time left.
  void step(std::int64_t step, double epoch, double loss, double lr, std::int64_t images,
            double step_seconds);
  // A line of its own (an evaluation, a warning) that does not run into the bar.
  void note(const std::string& text);
  void finish();

 private:
  void clear_bar();

  ProgressOptions options_;
  bool terminal_ = false;
  bool bar_shown_ = false;
  double rate_ = 0;  // steps a second, moving average
  double image_rate_ = 0;
  double since_drawn_ = 1e9;  // step seconds since the bar was drawn
};

// "1:02:03", "4:05"
std::string format_duration(double seconds);
// "1.2 kB", "3.4 MB": powers of 1000
std::string format_bytes(double bytes);
// The line itself, without the bar: for tests and for both ways of showing it.
std::string progress_line(std::int64_t step, std::int64_t total, double epoch, double loss, double lr,
                          double images_per_second, double seconds_left);

}  // namespace topknot
