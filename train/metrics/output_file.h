#pragma once
// Files that appear whole or not at all, and what they may take the place of.

#include <cstdint>
#include <cstdio>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace topknot {

// A file, or standard output for "-", written piece by piece. A plain file appears under its name at close()
// and not at all where close() is not reached; an earlier one of that name stays until then. Throws UserError
// with path and reason where it cannot be written (disk full).
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  OutputFile(const OutputFile&) = delete;
  ~OutputFile();
  void write(std::string_view text);
  // Overwrites the first bytes. Nothing is written afterwards.
  void rewrite_begin(std::string_view text);
  void close();

 private:
  [[noreturn]] void fail(int error);
  std::string path_, target_, temporary_;  // temporary_: "" if the file is written in place
  std::FILE* file_ = nullptr;
  int error_ = 0;  // of an earlier write, after which the file does not appear
};

// A number that reads back to the same double; whole ones without a point, NaN and infinity as null.
nlohmann::ordered_json json_number(double value);
// Nothing if it is no whole number that fits. nlohmann's own conversion of 1e300 to an integer is undefined.
std::optional<std::int64_t> whole_number(const nlohmann::ordered_json& json);

void write_file(const std::string& path, std::string_view text);

// Whether a run writes a file or folder of this name, such as trace_rank3.json or metrics.csv.part-4242.
bool has_run_name(const std::string& name);

// The files that an output file named by the user may replace.
enum class Replace {
  nothing,  // no file that is there
  reports,  // a file that is neither a model nor an array
  all,      // any file
};

// Throws UserError if `path` lies in the checkpoints of a run or is another file that a run has written, or a
// config.yaml, by whatever links and relative names; and if it is a file that `replace` does not allow: this
// message ends with `remedy`. Pipes, devices and "-" pass.
void check_output(const std::string& path, Replace replace, const std::string& remedy);

}  // namespace topknot
