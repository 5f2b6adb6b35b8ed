#pragma once
// Windows of a token stream for recurrent models, as Zaremba, Sutskever, Vinyals (arXiv 1409.2329) lay them out: the stream
// is cut into columns. Row i of a rank's batches goes down one column, a window of tokens per step, so that the state
// carried from batch to batch is that of the text before the window.

#include <cstdint>
#include <vector>

namespace topknot {

class StreamSampler {
 public:
  // A stream of `tokens` in windows of `window`, in which every token but the last is followed by one to predict.
  // Training: `batch` columns per rank, all of one length; what does not fill a window in each of them is left out.
  // Evaluation: `batch` columns over all ranks (one per rank where there are more ranks), so that the result does not
  // depend on their number. They differ by a window at most, the longer ones come first, and the stream's last window may
  // reach beyond its end.
  // UserError where a training column would have no window.
  StreamSampler(std::int64_t tokens, std::int64_t window, int ranks, std::int64_t batch, bool train);

  std::int64_t steps(int rank) const;    // batches of an epoch; evaluation: ranks differ by one at most
  std::int64_t windows(int rank) const;  // in all of them
  // Of each row, its window's first token. In evaluation the last batch has the rows of the longer columns only.
  std::vector<std::int64_t> batch(int rank, std::int64_t step) const;

 private:
  std::int64_t first_column(int rank) const { return columns_ * rank / ranks_; }
  // Windows in column c, and the stream's first token in it.
  std::int64_t length(std::int64_t c) const {
    return windows_ / columns_ + (c < windows_ % columns_ ? 1 : 0);
  }
  std::int64_t begin(std::int64_t c) const;

  std::int64_t window_, ranks_, columns_;
  std::int64_t stride_ = 0;   // training: tokens of a column
  std::int64_t windows_ = 0;  // over all columns
};

}  // namespace topknot
