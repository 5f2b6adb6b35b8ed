#pragma once
// Gradients of a run, as train.record_gradients leaves them in its folder: config.yaml, and gradients.npy with
// rank 0's own gradients of some steps, float32 [steps, d] in the order of that run's arena. Read row by row
// when they are asked for, so a recording may be larger than memory.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "train/config/config.h"
#include "train/metrics/npy.h"
#include "train/setup.h"

namespace topknot {

class Recording {
 public:
  // Throws UserError: no such folder, nothing recorded in it, a damaged file, or one that does not fit the
  // model of config.yaml. Of the data set its shape is needed, so its test files must be where the run found
  // them (synthetic sets need none).
  explicit Recording(const std::string& folder);

  const Config& config() const { return config_; }  // of the run
  std::int64_t steps() const { return steps_; }     // recorded
  std::size_t size() const { return size_; }        // elements of a gradient

  // The run's model, its parameters laid out as `config` has it, which may differ in what is compressed.
  std::unique_ptr<BuiltModel> model(const Config& config) const;
  // Puts `scale` times a recorded gradient (`step` from 0) into the gradients of a model's arena, whatever
  // its order. Throws UserError where the file cannot be read.
  void fill(ParameterArena& arena, std::int64_t step, float scale) const;

 private:
  std::string folder_;
  Config config_;
  std::unique_ptr<Dataset> data_;
  std::unique_ptr<NpyReader> reader_;
  std::int64_t steps_ = 0;
  std::size_t size_ = 0;
  std::map<std::string, std::size_t> offsets_;  // of the parameters in a recorded gradient
};

}  // namespace topknot
