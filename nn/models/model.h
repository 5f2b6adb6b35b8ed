#pragma once
// A model is a module with a name, made for one sample shape and number of outputs, in a file per family.

#include <string>
#include <vector>

#include "nn/base/registry.h"
#include "nn/layers/layers.h"

namespace topknot {

// Sizes that the data decide, and the keys `model.*`. A model ignores other models' keys.
struct ModelOptions : OptionValues {
  ModelOptions() : OptionValues("model") {}
  Shape input;               // of one sample: {C, H, W}
  std::int64_t outputs = 0;  // classes, or the width of the regression target
  // Recurrent models: most sequences of a batch, for the state that is carried between batches.
  std::int64_t batch = 1;
  bool on_gpu = false;   // whether it is to compute on one, whose attention takes heads of limited width
  double dropout = 0.5;  // probability, where the model has any
};

// Options that several files declare or read.
namespace option {
inline const Option width{"width", 200, "units of a layer, and of a token's embedding", 1, 1e5},
    layers{"layers", 2, "layers: of LSTM, of attention", 1, 1000},
    tied{"tied", false, "the output layer has the embedding's weight; gpt's always has"},
    context{"context", 0, "positions; 0: data.sequence_length, which may not be more", 0, 1e7};
}  // namespace option

using ModelFactory = ModulePtr (*)(ParameterStore& store, const ModelOptions& options);
inline Registry<ModelFactory>& models() {
  static Registry<ModelFactory> registry("model");
  return registry;
}

// `own`: the options that the model has besides.
inline bool add_model(const std::string& name, const std::string& help, ModelFactory factory,
                      std::vector<Option> own = {}) {
  return models().add(name, help, factory, std::move(own));
}
// A Net is made of a store and options.
template <class Net>
bool add_model(const std::string& name, const std::string& help, std::vector<Option> own = {}) {
  return add_model(name, help, make_as<Module, Net>, std::move(own));
}

// Throws UserError if a sample is no image of at least `least` x `least` pixels.
void require_images(const ModelOptions& options, const char* model, std::int64_t least);

// Throws UserError for an unknown name or a sample shape that the model cannot take.
inline ModulePtr make_model(const std::string& name, ParameterStore& store, const ModelOptions& options) {
  return models().find(name)(store, options);
}

}  // namespace topknot
