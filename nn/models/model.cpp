#include "nn/models/model.h"

namespace topknot {

Registry<ModelFactory>& models() {
  static Registry<ModelFactory> registry("model");
  return registry;
}

ModulePtr make_model(const std::string& name, ParameterStore& store, const ModelOptions& options) {
  return models().find(name)(store, options);
}

}  // namespace topknot
