// A step that exchanges gradients: every rank's, averaged by the exchange, change the weights by one
// optimizer, so that these stay the same on all ranks. Gradients are sent by the hooks of the backward pass.
#include <fmt/format.h>

#include <cmath>

#include "nn/base/log.h"
#include "optim/clip.h"
#include "optim/optimizer.h"
#include "train/setup.h"
#include "train/step.h"

namespace topknot {
namespace {

// The greatest norm of a rank's gradient before compression; 0: no clipping. compress.clip is thr_G of Lin et
// al., section 3.3, which clips gradients divided by N at N^-1/2 thr_G; here they are means, hence N^1/2.
double local_clip_norm(const Config& config, int ranks) {
  return config.compress.clip > 0 ? config.compress.clip * std::sqrt(ranks) : config.train.clip_local;
}

std::vector<std::span<float>> gradients_of(std::span<Parameter* const> parameters) {
  std::vector<std::span<float>> gradients;
  for (const Parameter* p : parameters) gradients.emplace_back(p->gradient(), p->numel());
  return gradients;
}

class GradientStep final : public StepRule {
 public:
  GradientStep(const Config& config, Communicator& communicator, Runner& runner, Replica& replica)
      : config_(config),
        root_(communicator.rank() == 0),
        clip_norm_(local_clip_norm(config, communicator.size())),
        clip_model_(clip_norm_ > 0 && config.train.clip_local_scope == "model"),
        runner_(runner),
        replica_(replica),
        arena_(replica.arena()),
        optimizer_(make_optimizer(config.optimizer, arena_)),
        clip_(arena_.device(), arena_.size()) {}

  ParameterArena& shared_weights() override { return arena_; }

  void exchange_by(Exchange& exchange, Recorder& recorder) override {
    exchange_ = &exchange, recorder_ = &recorder;
    if (clip_norm_ > 0 && !clip_model_)  // tensors one by one, those of a group at a time
      exchange.when_complete(
          [this](const Group& group) { clip_.clip_each(gradients_of(group.parameters), clip_norm_); });
  }

  StepReport make(const StepContext& context) override {
    exchange_->begin_step(context);
    runner_.run({[&] { compute(context.step); }, [&] { exchange_->communicate(); }, [&] { apply(); },
                 replica_.loss()});
    return exchange_->end_step();
  }

  std::vector<std::span<float>> shared_state() override { return optimizer_->state(); }

 private:
  using Phase = Runner::Phase;

  void compute(std::int64_t step) {
    replica_.forward_and_backward(step, clip_model_ ? GradientHook{} : hook_);
    if (clip_model_) runner_.in_phase(Phase::clip, [&] { clip_and_send_all(); });
    exchange_->end_backward(replica_.loss());
  }

  void apply() {
    exchange_->decode_and_commit();
    if (exchange_->committed())
      runner_.in_phase(Phase::update, [&] {
        if (config_.train.clip_global > 0) set_gradient_scale();
        for (const Group& group : exchange_->groups())
          optimizer_->update(group.begin, exchange_->averaged(group), exchange_->step_state(),
                             exchange_->applied(group));
      });
    replica_.restore_statistics_if_bad(exchange_->step_state().status);
  }

  void gradient_final(Parameter& parameter) {
    runner_.in_phase(Phase::hook, [&] {
      recorder_->take(parameter);
      exchange_->ready(parameter);
    });
  }

  void clip_and_send_all() {
    arena_.zero_unwritten_gradients();
    for (const Parameter* parameter : arena_.parameters()) recorder_->take(*parameter);
    const std::vector<std::span<float>> gradients = gradients_of(arena_.parameters());
    clip_.sum_of_squares(gradients);
    clip_.scale(gradients, clip_norm_);
    warn_of_much_clipping();
    for (Parameter* parameter : arena_.parameters()) exchange_->ready(*parameter);
  }

  // If clipping cuts nearly every gradient, only its direction is left, which costs accuracy: dgc on CIFAR-10
  // with compress.clip=0.25 ended twelve points below dgc without. On a CPU, where the norm is known at once.
  void warn_of_much_clipping() {
    constexpr int kWatched = 100, kMany = 90;
    if (arena_.device().kind != DeviceKind::cpu) return;
    cuts_ += clip_factor(std::sqrt(*clip_.sum()), clip_norm_) < 1;
    if (++clips_ != kWatched || cuts_ < kMany || !root_) return;
    log_warning(
        fmt::format("{}: {} of the first {} gradients were longer and were cut, so that little but their "
                    "direction counts; raise it or leave it out",
                    config_.compress.clip > 0 ? "compress.clip" : "train.clip_local", cuts_, kWatched));
  }

  void set_gradient_scale() {
    std::vector<std::span<float>> averages;
    for (const Group& group : exchange_->groups()) averages.push_back(exchange_->averaged(group));
    clip_.sum_of_squares(averages);
    clip_.set_gradient_scale(config_.train.clip_global, exchange_->step_state().parameters);
  }

  const Config& config_;
  const bool root_;
  // The greatest norm of this rank's gradient, or of each tensor's, before compression; 0: no clipping.
  const double clip_norm_;
  const bool clip_model_;
  Runner& runner_;
  Replica& replica_;
  ParameterArena& arena_;
  const std::unique_ptr<Optimizer> optimizer_;
  Clip clip_;
  Exchange* exchange_ = nullptr;
  Recorder* recorder_ = nullptr;
  const GradientHook hook_ = [this](Parameter& parameter) { gradient_final(parameter); };
  int clips_ = 0, cuts_ = 0;  // gradients that warn_of_much_clipping() has looked at, and that were cut
};

}  // namespace

std::unique_ptr<StepRule> make_gradient_step(const Config& config, Communicator& communicator, Runner& runner,
                                             Replica& replica) {
  return std::make_unique<GradientStep>(config, communicator, runner, replica);
}

}  // namespace topknot
