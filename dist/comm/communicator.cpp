#include "dist/comm/communicator.h"

#include <fmt/format.h>

#include "nn/base/text.h"

namespace topknot {

std::string Communicator::place() const {
  std::string text;
  if (step_ >= 0) text += fmt::format(", step {}", step_);
  if (group_ >= 0) text += fmt::format(", group {}", group_);
  return text;
}

void check_same(Communicator& communicator, const std::string& what, const std::string& value) {
  std::vector<std::vector<std::byte>> all;
  communicator.all_gather(std::as_bytes(std::span(value)), all);
  const auto text = [&](std::size_t r) {
    constexpr std::size_t longest = 80;
    const std::string full(reinterpret_cast<const char*>(all[r].data()), all[r].size());
    return "'" + one_line(full, longest) + "'";
  };
  std::size_t odd = 1;
  while (odd < all.size() && all[odd] == all[0]) ++odd;
  if (odd == all.size()) return;
  try {
    communicator.barrier();  // the first to throw must not end the others' all_gather
  } catch (const CollectiveError&) {
    // Another rank has passed the barrier and ended; all know what is wrong.
  }
  throw UserError(
      fmt::format("the ranks disagree about {}: rank 0 has {}, rank {} has {}; start all ranks with the same "
                  "program and configuration",
                  what, text(0), odd, text(odd)));
}

std::string unmatched_partners(std::span<const std::pair<int, int>> partners) {
  const auto name = [](int rank) { return rank < 0 ? std::string("no rank") : fmt::format("rank {}", rank); };
  for (std::size_t r = 0; r < partners.size(); ++r) {
    const auto [to, from] = partners[r];
    const int self = static_cast<int>(r);
    if (to >= 0 && partners[static_cast<std::size_t>(to)].second != self)
      return "the ranks do not make the same calls: in send_receive " + name(self) + " sends to " + name(to) +
             ", which expects " + name(partners[static_cast<std::size_t>(to)].second);
    if (from >= 0 && partners[static_cast<std::size_t>(from)].first != self)
      return "the ranks do not make the same calls: in send_receive " + name(self) + " expects " +
             name(from) + ", which sends to " + name(partners[static_cast<std::size_t>(from)].first);
  }
  return "";
}

}  // namespace topknot
