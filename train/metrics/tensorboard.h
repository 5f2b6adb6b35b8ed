#pragma once
// Scalars in an event file that TensorBoard reads: TFRecords (length, masked CRC-32C of it, data, masked
// CRC-32C of them; tensorflow/core/lib/io/record_writer.h) of Event messages
// (tensorflow/core/util/event.proto).

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace topknot {

class TensorBoardWriter {
 public:
  // Makes a new file events.out.tfevents.SECONDS.HOST.PID in the folder. `steps_made`: before this start; if
  // not 0, TensorBoard forgets what earlier files have of later steps. UserError as write().
  explicit TensorBoardWriter(const std::string& folder, std::int64_t steps_made = 0);
  ~TensorBoardWriter() {
    if (file_) std::fclose(file_);
  }
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  using Scalars = std::vector<std::pair<std::string, double>>;  // tag, value
  // One event, written through at once; values are rounded to float. UserError if that fails (disk full).
  void write(std::int64_t step, const Scalars& scalars);

  const std::string& path() const { return path_; }

 private:
  void event(std::int64_t step, const std::string& content);

  std::string path_;
  std::FILE* file_ = nullptr;
};

}  // namespace topknot
