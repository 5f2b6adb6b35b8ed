#pragma once
// A small text for runs of language models: lines of a subject, a verb and an object, of which the first
// decides the others, so that a model that remembers is left with the choice of the subject.

#include "nn/core/rng.h"
#include "tests/support/test.h"

namespace topknot::testing {

constexpr int kSubjects = 8;

class MadeUpText {
 public:
  explicit MadeUpText(int lines = 400) {
    write("train.txt", lines, 1);
    write("valid.txt", lines / 4, 2);
    write("test.txt", lines / 4, 3);
  }
  std::string root() const { return folder_.str(); }

 private:
  void write(const char* name, int lines, std::uint32_t stream) {
    const CounterRng rng(1, RngUse::test, stream);
    std::string text;
    for (int i = 0; i < lines; ++i) {
      const std::string k = std::to_string(rng.below(static_cast<std::uint64_t>(i), kSubjects));
      text += "subject" + k + " verb" + k + " object" + k + "\n";
    }
    folder_.write(name, std::vector<std::uint8_t>(text.begin(), text.end()));
  }
  TempFolder folder_;
};

}  // namespace topknot::testing
