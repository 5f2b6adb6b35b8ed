#include "data/dataset.h"

namespace topknot {

std::int32_t Dataset::label(std::int64_t) const {
  throw Error("data set '" + name() + "' has no labels");
}

void Dataset::target(std::int64_t, float*) const {
  throw Error("data set '" + name() + "' has no targets");
}

Registry<DatasetFactory>& datasets() {
  static Registry<DatasetFactory> registry("data set");
  return registry;
}

std::unique_ptr<Dataset> make_dataset(const std::string& name, const DatasetOptions& options, Split split) {
  return datasets().find(name)(options, split);
}

std::int64_t limited_size(const DatasetOptions& options, Split split, std::int64_t available) {
  const bool train = split == Split::train;
  const std::int64_t wanted = train ? options.train_size : options.test_size;
  const std::string key = train ? "data.train_size" : "data.test_size";
  if (wanted < 0)
    throw UserError(key + ": " + std::to_string(wanted) + " is negative; give 0 for all samples");
  if (wanted > available)
    throw UserError(key + ": " + std::to_string(wanted) + " samples asked for, the data set has " +
                    std::to_string(available) + "; give at most that, or 0 for all");
  return wanted == 0 ? available : wanted;
}

}  // namespace topknot
