#pragma once
// What topknot_create() is told: keys as texts, tensors; and topknot_methods().

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"

namespace topknot {

struct LibrarySettings {
  CompressOptions options;
  double density = 0.001;
  bool dense_1d = true;
  std::int64_t min_numel = 0;
  bool whole = false;  // scope=model
  int threads = 0;     // 0: OpenMP's number
  bool undo = false;
  std::string carried;  // the given keys on which a state depends
};

// From "name=value" texts. Throws UserError for an unknown method or key, a value outside its range, a
// combination that makes no sense.
LibrarySettings library_settings(const std::string& method, std::span<const std::string> keys);

// The JSON of topknot_methods().
std::string methods_json();

}  // namespace topknot
