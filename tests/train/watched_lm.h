#pragma once
// Runs of language models: their keys, and an lstm_lm that keeps the states with which its steps begin.

#include "nn/models/model.h"
#include "tests/train/small_run.h"

namespace topknot::testing {

inline Keys language_model_keys(const std::string& root, const Keys& more) {
  return with({"data.root=" + root, "data.train_size=0", "data.test_size=0", "model.name=lstm_lm",
               "model.dropout=0", "optimizer.momentum=0", "optimizer.weight_decay=0", "train.clip_global=0.5",
               "compress.density=0.05", "train.threads=1"},
              more);
}

constexpr std::uint32_t kBrokenStep = 3;

// The state with which each training step of rank 0 begins.
inline std::vector<std::vector<float>> seen_states;

// `kBreaks`: the logits are NaN in one step of rank 0.
template <bool kBreaks>
class WatchedLm final : public Module {
 public:
  WatchedLm(ParameterStore& store, const ModelOptions& options)
      : store_(store), inner_(make_model("lstm_lm", store, options)) {}
  bool reads_tokens() const override { return true; }
  Variable forward(const Variable& x, const ForwardContext& context) override {
    const bool watched = context.training && context.rank == 0;
    if (watched) seen_states.push_back(store_.buffers().back()->values);
    Variable y = inner_->forward(x, context);
    if (kBreaks && watched && context.step == kBrokenStep)
      y.value().data()[0] = std::numeric_limits<float>::quiet_NaN();
    return y;
  }

 private:
  ParameterStore& store_;
  ModulePtr inner_;
};
inline const bool watched_lms_registered =
    (add_model<WatchedLm<false>>("test_watched_lm", "of the tests"),
     add_model<WatchedLm<true>>("test_broken_lm", "of the tests"), true);

}  // namespace topknot::testing
