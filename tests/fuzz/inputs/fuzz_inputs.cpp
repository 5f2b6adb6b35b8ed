// Damaged input through every reader of files and messages from outside:
//   fuzz_inputs --target NAME [--seconds S] [--seed N] [--corpus DIR] [--out DIR]
//   fuzz_inputs --target NAME FILE...    runs these inputs, once each
//   fuzz_inputs --list                   the targets
// The corpus to begin with is tests/fuzz/corpus/NAME, or DIR. The first finding ends it with a code other
// than 0 and the input as a file in --out (.).
#include <omp.h>

#include <charconv>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

#include "nn/base/check.h"
#include "tests/fuzz/inputs/input_target.h"

namespace topknot::fuzz {

Registry<InputTarget>& input_targets() {
  static Registry<InputTarget> registry("input (--target)");
  return registry;
}

void run_input(InputTarget target, Bytes input) {
  try {
    target(input);
  } catch (const Error&) {  // refused
  }
}

Scratch::Scratch() {
  const std::filesystem::path memory = "/dev/shm";
  std::error_code error;
  const bool there = std::filesystem::is_directory(memory, error);
  std::string pattern =
      ((there ? memory : std::filesystem::temp_directory_path()) / "topknot-fuzz-XXXXXX").string();
  if (!mkdtemp(pattern.data())) throw UserError(pattern + ": no temporary folder can be made");
  folder_ = pattern;
}

Scratch::~Scratch() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string Scratch::write(const std::string& name, Bytes content) const {
  std::filesystem::create_directories((folder_ / name).parent_path());
  std::ofstream file(folder_ / name, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(content.size()));
  if (!file.flush()) throw UserError(path(name) + ": cannot be written");
  return path(name);
}

void Scratch::remove(const std::string& name) const {
  std::error_code ignored;
  std::filesystem::remove(folder_ / name, ignored);
}

namespace {

template <class Number>
Number number(const std::string& key, std::string_view text) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    throw UserError(key + ": '" + std::string(text) + "' is not a number");
  return value;
}

int run(int argc, char** argv) {
  Campaign campaign;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (key == "--list") {
      for (const std::string& name : input_targets().names()) std::printf("%s\n", name.c_str());
      return 0;
    }
    if (!key.starts_with("--")) {
      files.push_back(key);
      continue;
    }
    if (++i == argc) throw UserError(key + " needs a value");
    if (key == "--target")
      campaign.target = argv[i];
    else if (key == "--seconds")
      campaign.seconds = number<double>(key, argv[i]);
    else if (key == "--seed")
      campaign.seed = number<std::uint64_t>(key, argv[i]);
    else if (key == "--corpus")
      campaign.corpus = argv[i];
    else if (key == "--out")
      campaign.out = argv[i];
    else
      throw UserError("unknown option " + key +
                      "; there are --target, --seconds, --seed, --corpus, --out, --list");
  }
  const InputTarget target = input_targets().find(campaign.target);
  for (const std::string& file : files) {
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> content{std::istreambuf_iterator<char>(stream), {}};
    if (!stream) throw UserError(file + ": cannot be read");
    run_input(target, std::as_bytes(std::span(content)));
  }
  if (!files.empty()) return 0;
  if (campaign.corpus.empty())
    campaign.corpus = (std::filesystem::path(TOPKNOT_FUZZ_CORPUS) / campaign.target).string();
  if (!std::filesystem::is_directory(campaign.corpus)) throw UserError(campaign.corpus + ": no such folder");
  return run_campaign(campaign, target);
}

}  // namespace
}  // namespace topknot::fuzz

int main(int argc, char** argv) {
  omp_set_num_threads(1);
  try {
    return topknot::fuzz::run(argc, argv);
  } catch (const topknot::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
