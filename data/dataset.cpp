#include "data/dataset.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>

#include "nn/base/checksum.h"
#include "nn/base/file.h"
#include "nn/base/memory.h"
#include "nn/base/text.h"

namespace topknot {

void Dataset::get(std::int64_t index, float* sample) const {
  const std::uint8_t* pixels = bytes(index);
  std::vector<std::uint8_t> decoded;
  if (on_demand()) {
    std::vector<DamagedFile> damaged;
    decoded.resize(static_cast<std::size_t>(sample_shape().numel()));
    decode(index, nullptr, decoded.data(), damaged);
    if (!damaged.empty()) throw UserError(damaged.front().what);
    pixels = decoded.data();
  }
  for (std::int64_t i = 0; i < sample_shape().numel(); ++i)
    sample[i] = static_cast<float>(pixels[i]) / 255.0f;
}

std::vector<std::int32_t> Dataset::encode(const std::string& text) const {
  std::vector<std::int32_t> tokens;
  constexpr std::string_view kBlanks = " \t\r\n";
  for (std::size_t at = 0; (at = text.find_first_not_of(kBlanks, at)) != std::string::npos;) {
    const std::size_t stop = std::min(text.find_first_of(kBlanks, at), text.size());
    const char* const end = text.data() + stop;
    std::int32_t token = 0;
    if (const auto [rest, error] = std::from_chars(text.data() + at, end, token);
        error != std::errc() || rest != end || token < 0 || token >= classes())
      throw UserError(fmt::format("'{}' is no token of data.name={}, whose tokens are numbers from 0 to {}",
                                  text.substr(at, stop - at), name(), classes() - 1));
    tokens.push_back(token);
    at = stop;
  }
  return tokens;
}

Option option::windows() {
  return {.name = "windows",
          .standard = "columns",
          .help =
              "the training windows: each row of the batch goes down a column of the text, and a recurrent "
              "state goes on; or each begins at a token drawn at random, with a state of zeros",
          .choices = {"columns", "random"}};
}

Registry<DatasetFactory>& datasets() {
  static Registry<DatasetFactory> registry("data set");
  return registry;
}

std::unique_ptr<Dataset> make_dataset(const std::string& name, const DatasetOptions& options, Split split) {
  return datasets().find(name)(options, split);
}

std::uint64_t data_checksum(const Dataset& data, std::int64_t most_bytes) {
  Checksum checksum;
  if (data.add_to(checksum)) return checksum.value();
  const auto add = [&checksum](const void* bytes, std::size_t size) {
    checksum.update({static_cast<const std::byte*>(bytes), size});
  };
  std::vector<float> values(static_cast<std::size_t>(std::max(data.sample_shape().numel(), data.targets())));
  const auto numel = static_cast<std::size_t>(data.sample_shape().numel());
  const std::int64_t samples = data.size();
  const std::size_t sample_bytes = samples > 0 && data.bytes(0) ? numel : numel * sizeof(float);
  const std::int64_t most = std::max<std::int64_t>(1, most_bytes / static_cast<std::int64_t>(sample_bytes));
  const std::int64_t stride = (samples + most - 1) / most;
  for (std::int64_t i = 0; i < samples; ++i) {
    if (data.classes() > 0) {
      const std::int32_t label = data.label(i);
      add(&label, sizeof label);
    } else {
      data.target(i, values.data());
      add(values.data(), static_cast<std::size_t>(data.targets()) * sizeof(float));
    }
    if (i % stride != 0) continue;
    if (const std::uint8_t* bytes = data.bytes(i)) {
      add(bytes, numel);
    } else {
      data.get(i, values.data());
      add(values.data(), numel * sizeof(float));
    }
  }
  return checksum.value();
}

std::int64_t limited_size(const DatasetOptions& options, Split split, std::int64_t available) {
  const bool train = split == Split::train;
  const std::int64_t wanted = train ? options.train_size : options.test_size;
  const std::string key = train ? "data.train_size" : "data.test_size";
  if (wanted < 0) throw UserError(fmt::format("{}: {} is negative; give 0 for all samples", key, wanted));
  if (wanted > available)
    throw UserError(
        fmt::format("{}: {} samples asked for, the data set has {}; give at most that, or 0 for all", key,
                    wanted, available));
  return wanted == 0 ? available : wanted;
}

std::string damaged_note(const std::string& what, const std::string& instead, std::int64_t count,
                         int max_bad_files) {
  if (count > max_bad_files)
    throw UserError(fmt::format("{}; mend or remove it, or give data.max_bad_files={} or more, with which {}",
                                what, count, instead));
  return fmt::format("{}; {} (bad file {} of data.max_bad_files={})", what, instead, count, max_bad_files);
}

void check_fits(Split split, std::int64_t samples, std::int64_t bytes_per_sample) {
  const double bytes = static_cast<double>(samples) * static_cast<double>(bytes_per_sample);
  if (bytes > memory_limit())
    throw UserError(
        fmt::format("data.{}_size: {} samples of {} are {}, and this process may have at most {}; give fewer",
                    split == Split::train ? "train" : "test", samples,
                    format_bytes(static_cast<double>(bytes_per_sample)), format_bytes(bytes),
                    format_bytes(memory_limit())));
}

namespace {

namespace fs = std::filesystem;

std::string missing(const std::string& dataset, const std::string& folder, const std::string& what) {
  return fmt::format("data.root: '{1}': {2}; `scripts/fetch-data {0} --to {1}` brings the files of {0}",
                     dataset, folder, what);
}

std::string alternatives(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, " or "));
}

template <class Bytes>
Bytes read_whole(const std::string& path) {
  const Fd file = open_regular_file(path);
  const auto fail = [&](const std::string& why) {
    throw UserError(fmt::format("cannot read '{}': {}; check the disk", path, why));
  };
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail(errno_text());
  const auto size = static_cast<std::size_t>(status.st_size);
  Bytes content =
      with_memory("the content of '" + path + "'", static_cast<double>(size), [&] { return Bytes(size, 0); });
  for (std::size_t at = 0; at < size;) {
    const ssize_t got = read(file.get(), content.data() + at, size - at);
    if (got == 0) fail("it has become shorter");
    if (got < 0 && errno != EINTR) fail(errno_text());
    if (got > 0) at += static_cast<std::size_t>(got);
  }
  return content;
}

}  // namespace

std::string fetch_hint(const std::string& dataset, const std::string& folder) {
  return fmt::format("; delete it and run `scripts/fetch-data {} --to {}` for a good copy", dataset, folder);
}

std::string find_data_folder(const std::string& dataset, const std::string& root,
                             const std::vector<std::string>& subs, const std::vector<std::string>& names) {
  if (root.empty())
    throw UserError(fmt::format(
        "data.root is not set: {0} needs the folder of its files; `scripts/fetch-data {0} --to DIR` "
        "brings them, then give data.root=DIR",
        dataset));
  std::error_code ignored;
  if (!fs::is_directory(root, ignored)) throw UserError(missing(dataset, root, "there is no such folder"));
  std::string looked = fmt::format("there is no {} in it", alternatives(names));
  std::vector<fs::path> folders = {root};
  for (const auto& sub : subs) {
    folders.push_back(fs::path(root) / sub);
    looked += " or in its " + sub + "/";
  }
  for (const auto& folder : folders)
    for (const auto& name : names)
      if (fs::exists(folder / name, ignored)) return folder.string();
  throw UserError(missing(dataset, root, looked));
}

std::string find_data_file(const std::string& dataset, const std::string& folder,
                           const std::vector<std::string>& names) {
  std::error_code ignored;
  for (const auto& name : names)
    if (fs::path path = fs::path(folder) / name; fs::is_regular_file(path, ignored)) return path.string();
  for (const auto& name : names)
    if (fs::path path = fs::path(folder) / name; fs::exists(path, ignored)) open_regular_file(path.string());
  throw UserError(missing(dataset, folder, alternatives(names) + " is missing"));
}

std::vector<std::uint8_t> read_file(const std::string& path) {
  return read_whole<std::vector<std::uint8_t>>(path);
}

std::string read_text(const std::string& path) {
  std::string text = read_whole<std::string>(path);
  const auto refuse = [&](const std::string& what) {
    throw UserError(fmt::format("'{}' is no text: {}; give plain text in UTF-8", path, what));
  };
  if (text.starts_with("\xff\xfe") || text.starts_with("\xfe\xff")) refuse("it begins as UTF-16 does");
  if (const std::size_t at = text.find('\0'); at != text.npos)
    refuse(fmt::format("its byte {} (from 0) is 0, as in UTF-16 and binary files", at));
  if (text.starts_with("\xef\xbb\xbf")) text.erase(0, 3);
  return text;
}

std::vector<std::uint8_t> read_gzip(const std::string& path, const std::string& hint) {
  Fd opened = open_regular_file(path);
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzdopen(opened.get(), "rb"), gzclose);
  if (!file) throw OutOfMemory("reading '" + path + "'", 0);
  opened.release();  // gzclose() closes it
  std::vector<std::uint8_t> content;
  std::vector<std::uint8_t> chunk(1 << 18);
  int got = 0;
  constexpr std::size_t kMostBytes = 1'000'000'000;  // MNIST's largest file has 47 MB
  while ((got = gzread(file.get(), chunk.data(), static_cast<unsigned>(chunk.size()))) > 0) {
    content.insert(content.end(), chunk.begin(), chunk.begin() + got);
    if (content.size() > kMostBytes)
      throw UserError(fmt::format("corrupt gzip file '{}': more than 1 GB when unpacked{}", path, hint));
  }
  // zlib passes a file without a gzip header through as it is, and reports a cut end by Z_BUF_ERROR alone.
  int code = Z_OK;
  const char* text = gzerror(file.get(), &code);
  if (got < 0 || code != Z_OK)
    throw UserError(
        fmt::format("corrupt gzip file '{}': {}{}", path, code == Z_BUF_ERROR ? "cut short" : text, hint));
  if (gzdirect(file.get()))
    throw UserError(fmt::format("corrupt gzip file '{}': it has no gzip header{}", path, hint));
  return content;
}

}  // namespace topknot
