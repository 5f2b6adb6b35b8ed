#include "tools/replay/recording.h"

#include <fmt/format.h>

#include <filesystem>

#include "nn/base/check.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

// Only the shape of its samples and the number of classes are used.
std::unique_ptr<Dataset> smallest_data(const Config& config) {
  DatasetOptions options = dataset_options(config);
  options.sequence_length = 1;
  options.test_size = 2;  // a text needs the word after the first
  return make_dataset(config.data.name, options, Split::test);
}

}  // namespace

Recording::Recording(const std::string& folder) : folder_(folder) {
  std::error_code error;
  const std::string hint = "; 'bench --record DIR FILE.yaml' makes a folder that can be replayed";
  if (!fs::is_directory(folder, error)) throw UserError(folder + ": no such folder" + hint);
  const std::string yaml = folder + "/config.yaml", gradients = folder + "/gradients.npy";
  for (const std::string& path : {yaml, gradients})
    if (!fs::exists(path, error)) throw UserError(path + " is missing" + hint);

  const LoadedConfig loaded = load_config(yaml, {});
  throw_problems(loaded.problems);
  config_ = loaded.config;
  throw_problems(check_config(config_));
  data_ = smallest_data(config_);

  reader_ = std::make_unique<NpyReader>(gradients);
  const auto built = build_model(config_, *data_, {}, false);
  const ParameterArena& arena = built->store.arena();
  size_ = arena.size();
  for (const Parameter* parameter : arena.parameters()) offsets_[parameter->name()] = parameter->offset();
  const std::vector<std::size_t>& shape = reader_->shape();
  if (shape.size() != 2 || shape[1] != size_ || shape[0] == 0)
    throw UserError(
        fmt::format("{} is an array {}, but {} parameters ({} of config.yaml beside it) need [steps, {}]{}",
                    gradients, npy_shape_text(shape), size_, config_.model.name, size_, hint));
  steps_ = static_cast<std::int64_t>(shape[0]);
}

std::unique_ptr<BuiltModel> Recording::model(const Config& config) const {
  Config mine = config_;
  mine.compress = config.compress;
  mine.train.device = config.train.device;
  return build_model(mine, *data_, {}, false);
}

void Recording::fill(ParameterArena& arena, std::int64_t step, float scale) const {
  TOPKNOT_CHECK(step >= 0 && step < steps_, "a step that was not recorded");
  const std::size_t row = static_cast<std::size_t>(step) * size_;
  for (const Parameter* parameter : arena.parameters()) {
    const std::span<float> gradient(parameter->gradient(), parameter->numel());
    reader_->read(row + offsets_.at(parameter->name()), gradient);
    for (float& g : gradient) g *= scale;
  }
}

}  // namespace topknot
