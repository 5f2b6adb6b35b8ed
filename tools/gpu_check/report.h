#pragma once
// The results of gpu-check, written anew after each one: gpu-check.json for programs, gpu-check.txt for people.

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace topknot::gpu_check {

enum class Status { passed, failed, skipped };
const char* name_of(Status status);

struct Result {
  std::string stage, name;
  Status status = Status::passed;
  double seconds = 0;
  std::vector<std::pair<std::string, double>> figures = {};  // "GB/s", "images/s", in this order
  std::string note = {};                                     // why it was skipped or failed, in one line
  std::string output = {};                                   // of a failed program, its end; in the JSON only
};

// One line of JSON, and back; nullopt for any other line.
std::string json_line(const Result& result);
std::optional<Result> result_of(const std::string& line);

class Report {
 public:
  // `folder` is made where there is none. Throws UserError where it cannot be written.
  explicit Report(std::string folder);
  // A line of the heading: "card", "NVIDIA H200".
  void describe(const std::string& what, const std::string& value);
  // Prints the line and writes the files. Throws UserError where these cannot be written any more.
  void add(Result result);
  // The two files as they stand, each complete or as it was before.
  void write() const;

  const std::vector<Result>& results() const { return results_; }
  bool any(Status status) const;
  std::string json() const;
  std::string table() const;

 private:
  std::string folder_;
  std::vector<std::pair<std::string, std::string>> about_;
  std::vector<Result> results_;
};

}  // namespace topknot::gpu_check
