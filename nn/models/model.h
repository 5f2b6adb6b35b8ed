#pragma once
// A model is a module with a name, made for one sample shape and number of outputs. One file per family; each
// registers the names it knows.

#include <memory>
#include <string>
#include <vector>

#include "nn/base/registry.h"
#include "nn/layers/layers.h"

namespace topknot {

// Sizes that the data decide, and the keys `model.*` of the same names. A model ignores other models' keys.
struct ModelOptions {
  Shape input;               // of one sample: {C, H, W}
  std::int64_t outputs = 0;  // classes, or the width of the regression target
  // Recurrent models: most sequences of a batch, for the state that is carried between batches.
  std::int64_t batch = 1;
  bool on_gpu = false;   // whether it is to compute on one, whose attention takes heads of limited width
  double dropout = 0.5;  // probability, where the model has any
  std::vector<int> hidden = {200, 200};  // mlp
  int width = 200, layers = 2;           // recurrent models, transformers
  bool tied = false;                     // lstm_lm, llama: the output layer has the embedding's weight
  double init_uniform = 0;  // lstm_lm: every parameter is uniform in +- this; 0: the model's own way
  // Transformers.
  int heads = 4, kv_heads = 0;  // of attention; kv_heads 0: as many
  int context = 0;              // positions that there are; 0: as many as a window of the data has
  int feed_forward = 0;         // width; 0: 4 width in gpt, 8/3 width up to a multiple of 256 in llama
  double norm_epsilon = 1e-5;
  bool bias = true;           // gpt: of linear layers and norms
  std::string gelu = "tanh";  // gpt: or exact
  double rope_base = 10000;   // llama
};

using ModelFactory = ModulePtr (*)(ParameterStore& store, const ModelOptions& options);
inline Registry<ModelFactory>& models() {
  static Registry<ModelFactory> registry("model");
  return registry;
}

inline void add_model(const std::string& name, const std::string& help, ModelFactory factory) {
  models().add(name, help, factory);
}
// A Net is made of a store and options.
template <class Net>
void add_model(const std::string& name, const std::string& help) {
  add_model(name, help, [](ParameterStore& store, const ModelOptions& options) -> ModulePtr {
    return std::make_unique<Net>(store, options);
  });
}

// Throws UserError if a sample is no image of at least `least` x `least` pixels.
void require_images(const ModelOptions& options, const char* model, std::int64_t least);

// Throws UserError for an unknown name or a sample shape that the model cannot take.
inline ModulePtr make_model(const std::string& name, ParameterStore& store, const ModelOptions& options) {
  return models().find(name)(store, options);
}

}  // namespace topknot
