#include "train/metrics/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <string_view>

#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// CRC-32C (Castagnoli), reflected.
std::uint32_t crc32c(std::string_view bytes) {
  constexpr std::uint32_t kPolynomial = 0x82F63B78;
  std::uint32_t crc = 0xFFFFFFFF;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
  }
  return ~crc;
}

std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xFF);
  return text;
}

std::string masked_crc(std::string_view bytes) {
  return little_endian(std::rotr(crc32c(bytes), 15) + 0xA282EAD8u, 4);
}

// Protocol buffers: a field is its number and wire type, then the value.
enum class Wire { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

std::string varint(std::uint64_t value) {
  std::string text;
  for (; value >= 0x80; value >>= 7) text += static_cast<char>(value | 0x80);
  return text + static_cast<char>(value);
}

std::string field(int number, Wire wire, const std::string& value) {
  const std::string key = varint(static_cast<std::uint64_t>(number) << 3 | static_cast<std::uint64_t>(wire));
  return key + (wire == Wire::bytes ? varint(value.size()) : "") + value;
}

// Fields of event.proto and summary.proto.
constexpr int kEventWallTime = 1, kEventStep = 2, kEventFileVersion = 3, kEventSummary = 5,
              kEventSessionLog = 7;
constexpr int kSessionStatus = 1, kSessionStart = 1;
constexpr int kSummaryValue = 1, kValueTag = 1, kValueSimple = 2;

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::string& folder, std::int64_t steps_made) {
  path_ = fmt::format("{}/events.out.tfevents.{:010.0f}.{}.{}", folder, wall_time(), host_name(), getpid());
  errno = 0;
  file_ = std::fopen(path_.c_str(), "ae");
  if (!file_)
    throw UserError(path_ + ": cannot be written: " + errno_text() +
                    "; choose another folder with output.dir");
  event(0, field(kEventFileVersion, Wire::bytes, "brain.Event:2"));
  if (steps_made > 0)  // TensorBoard drops events from this step on
    event(steps_made + 1,
          field(kEventSessionLog, Wire::bytes, field(kSessionStatus, Wire::varint, varint(kSessionStart))));
}

void TensorBoardWriter::write(std::int64_t step, const Scalars& scalars) {
  std::string values;
  for (const auto& [tag, number] : scalars)
    values += field(kSummaryValue, Wire::bytes,
                    field(kValueTag, Wire::bytes, tag) +
                        field(kValueSimple, Wire::fixed32,
                              little_endian(std::bit_cast<std::uint32_t>(static_cast<float>(number)), 4)));
  event(step, field(kEventSummary, Wire::bytes, values));
}

void TensorBoardWriter::event(std::int64_t step, const std::string& content) {
  std::string message =
      field(kEventWallTime, Wire::fixed64, little_endian(std::bit_cast<std::uint64_t>(wall_time()), 8));
  if (step != 0) message += field(kEventStep, Wire::varint, varint(static_cast<std::uint64_t>(step)));
  message += content;
  const std::string length = little_endian(message.size(), 8);
  const std::string record = length + masked_crc(length) + message + masked_crc(message);
  errno = 0;
  if (std::fwrite(record.data(), 1, record.size(), file_) != record.size() || std::fflush(file_) != 0)
    throw UserError(path_ + ": writing failed: " + errno_text() +
                    "; free space or choose another folder with output.dir");
}

}  // namespace topknot
