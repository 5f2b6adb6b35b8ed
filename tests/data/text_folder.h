#pragma once
// Texts in a folder, as data.name=text reads them.

#include "data/dataset.h"
#include "tests/support/test.h"

namespace topknot {

inline void put(const TempFolder& folder, const std::string& name, const std::string& text) {
  folder.write(name, {text.begin(), text.end()});
}

inline std::unique_ptr<Dataset> text_in(const TempFolder& folder, const std::string& tokens, Split split,
                                        int window, std::int64_t train_size = 0) {
  DatasetOptions options;
  options.root = folder.str();
  options.set("tokens", tokens);
  options.set("sequence_length", window);
  options.train_size = train_size;
  return make_dataset("text", options, split);
}

// The whole stream of tokens: a window's first, and each one's next.
inline std::vector<std::int32_t> stream_of(const Dataset& data) {
  std::vector<float> window(data.sample_shape()[0]);
  data.get(0, window.data());
  std::vector<std::int32_t> tokens = {static_cast<std::int32_t>(window[0])};
  for (std::int64_t i = 0; data.label(i) != kNoLabel; ++i) tokens.push_back(data.label(i));
  return tokens;
}

}  // namespace topknot
