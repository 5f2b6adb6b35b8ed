#include "data/transcript.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <sstream>
#include <utility>

#include "nn/base/check.h"

namespace topknot {
namespace {

template <class Sequence>
std::int64_t edit_distance(const Sequence& a, const Sequence& b) {
  std::vector<std::int64_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<std::int64_t>(j);
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::int64_t diagonal = std::exchange(row[0], static_cast<std::int64_t>(i) + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::int64_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::vector<std::string> words_of(std::string_view text) {
  std::istringstream in{std::string(text)};
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

}  // namespace

std::vector<std::int32_t> encode_transcript(std::string_view text) {
  std::vector<std::int32_t> labels;
  const auto blank = static_cast<std::int32_t>(kAlphabet.find(' '));
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    const char capital = static_cast<char>(std::toupper(code));
    const bool space = std::isspace(code) != 0;
    const std::size_t label = kAlphabet.find(capital, 1);
    if (!space && label == std::string_view::npos)
      throw UserError(
          fmt::format("a transcript has letters, apostrophes and blanks, and not {}",
                      std::isprint(code) ? fmt::format("'{}'", c) : fmt::format("byte {}", code)));
    if (!space)
      labels.push_back(static_cast<std::int32_t>(label));
    else if (!labels.empty() && labels.back() != blank)
      labels.push_back(blank);
  }
  if (!labels.empty() && labels.back() == blank) labels.pop_back();
  return labels;
}

std::string decode_transcript(std::span<const std::int32_t> labels) {
  std::string text;
  for (const std::int32_t label : labels) text += kAlphabet[static_cast<std::size_t>(label)];
  return text;
}

std::vector<std::int32_t> collapse_path(std::span<const std::int32_t> classes) {
  std::vector<std::int32_t> labels;
  for (std::size_t t = 0; t < classes.size(); ++t)
    if (classes[t] != 0 && (t == 0 || classes[t] != classes[t - 1])) labels.push_back(classes[t]);
  return labels;
}

TranscriptErrors transcript_errors(std::string_view recognised, std::string_view truth) {
  const auto joined = [](const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += word;
    return text;
  };
  const auto heard = words_of(recognised), said = words_of(truth);
  return {edit_distance(heard, said), static_cast<std::int64_t>(said.size()),
          edit_distance(joined(heard), joined(said)), static_cast<std::int64_t>(joined(said).size())};
}

}  // namespace topknot
