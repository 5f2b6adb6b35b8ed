#pragma once
// Small experiments on one process: `experiment NAME [key=value ...]`. A experiment is one file that
// registers its name, its keys and a function; it prints a table and writes its results into the folder that
// its key `out` names.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "nn/base/registry.h"

namespace topknot {

struct ExperimentKey {
  std::string name, value;  // value: the default
  std::string help;
};

// The keys' values: defaults, overridden by the command line. Each throws UserError that names the key.
class ExperimentArguments {
 public:
  // `given` are texts key=value. Throws UserError for unknown and repeated keys.
  ExperimentArguments(const std::string& experiment, const std::vector<ExperimentKey>& keys,
                      const std::vector<std::string>& given);

  const std::string& text(const std::string& key) const;
  std::int64_t integer(const std::string& key, std::int64_t lo, std::int64_t hi) const;
  // One or more numbers, "1,4,10", each in [lo, hi].
  std::vector<double> numbers(const std::string& key, double lo, double hi) const;
  std::vector<std::int64_t> integers(const std::string& key, std::int64_t lo, std::int64_t hi) const;
  // The folder that `key` names, created; files of the same names in it are overwritten.
  std::string folder(const std::string& key = "out") const;

 private:
  [[noreturn]] void refuse(const std::string& key, const std::string& needs) const;
  std::string experiment_;
  std::map<std::string, std::string> values_;
};

// The text between commas; nothing behind the last one.
std::vector<std::string> cells_of(const std::string& line);

// The rows of a experiment's results, as CSV (a header with the names; numbers with six digits) and as JSON
// lines.
struct ExperimentRows {
  std::string csv, jsonl;
  void add(const nlohmann::ordered_json& row);  // each with the names of the first one
};

// body(0) to body(count - 1) on all cores. Throws what the last one that failed did, when all have ended.
template <class Body>
void in_parallel(std::size_t count, const Body& body) {
  std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic, 1)
  for (std::size_t i = 0; i < count; ++i) try {
      body(i);
    } catch (...) {
#pragma omp critical(experiment_failure)
      failure = std::current_exception();
    }
  if (failure) std::rethrow_exception(failure);
}

struct Experiment {
  std::vector<ExperimentKey> keys;
  void (*run)(const ExperimentArguments& arguments);
};
Registry<Experiment>& experiments();

std::string experiments_help();                              // `experiment`, `experiment --help`
std::string experiment_help(const std::string& experiment);  // `experiment NAME --help`; throws UserError

}  // namespace topknot
