#include "tests/emulator/races.h"

#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>

#include "tests/emulator/machine_state.h"

namespace topknot::emulator::races {
namespace {

// Where the program and, of the calling thread, its thread_local variables are: there is shared memory.
struct Program {
  std::uintptr_t begin = 0;
  const char* local = nullptr;
  std::size_t local_bytes = 0;
};

Program this_program() {
  Program program;
  // The program itself comes first.
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& found = *static_cast<Program*>(data);
        found.begin = info->dlpi_addr;
        for (int i = 0; i < info->dlpi_phnum; ++i)
          if (info->dlpi_phdr[i].p_type == PT_TLS) {
            found.local = static_cast<const char*>(info->dlpi_tls_data);
            found.local_bytes = info->dlpi_phdr[i].p_memsz;
          }
        return 1;
      },
      &program);
  return program;
}

// A thread's time has two hands: the barriers that its block has passed, and what its lane has passed since
// then (__syncwarp, __threadfence).
struct Stamp {
  std::uint32_t code = 0;  // of the access, from the program's begin; 0: none
  std::uint32_t block = 0, epoch = 0;
  std::uint16_t thread = 0, clock = 0;

  bool same_thread(const Stamp& other) const { return block == other.block && thread == other.thread; }
  bool same_time(const Stamp& other) const {
    return code != 0 && same_thread(other) && epoch == other.epoch && clock == other.clock;
  }
};

// The last accesses to some bytes. Two readers do: whoever writes later is at most one of them.
struct Cell {
  using Two = std::array<Stamp, 2>;
  Stamp write;
  Two reads, atomics;
};

// 256 bytes, in cells of 4 bytes, or of 2 or 1 once there was an access to so few.
struct Page {
  static constexpr std::size_t kBytes = 256;
  int shift = 2;
  std::vector<Cell> cells{kBytes >> 2};

  void clear() {
    shift = 2;
    cells.assign(kBytes >> 2, {});
  }
  [[gnu::noinline]] void split(int to) {
    std::vector<Cell> finer(kBytes >> to);
    for (std::size_t i = 0; i < finer.size(); ++i) finer[i] = cells[i >> (shift - to)];
    cells = std::move(finer), shift = to;
  }
};

using Clocks = std::array<std::uint16_t, 32>;  // of the lanes of a warp

// What a thread knew of its own block at a fence: what it had done itself and what barriers had shown it.
struct Known {
  std::uint32_t block = 0, epoch = 0;
  std::uint16_t warp = 0;
  Clocks clocks{};

  bool operator==(const Known&) const = default;
  // The atomic operation that tells of the fence comes after it and is known all the same.
  bool covers(const Stamp& access, bool atomic) const {
    if (access.block != block) return false;
    return access.epoch < epoch || (access.epoch == epoch && access.thread / 32 == warp &&
                                    access.clock < clocks[access.thread % 32] + (atomic ? 1 : 0));
  }
};
using Knowledge = std::map<std::uint32_t, std::vector<Known>>;  // by block

void add(Knowledge& to, const Known& known) {
  auto& all = to[known.block];
  if (std::find(all.begin(), all.end(), known) == all.end()) all.push_back(known);
}
void join(Knowledge& to, const Knowledge& from) {
  for (const auto& [block, all] : from)
    for (const Known& known : all) add(to, known);
}
[[gnu::noinline]] bool covers(const Knowledge& knowledge, const Stamp& access, bool atomic) {
  if (knowledge.empty()) return false;
  const auto at = knowledge.find(access.block);
  return at != knowledge.end() && std::any_of(at->second.begin(), at->second.end(), [&](const Known& known) {
           return known.covers(access, atomic);
         });
}

// What was published at a place that atomic operations go to.
using Log = std::deque<Known>;

struct Thread {
  Clocks clocks{};                         // that it knows of its warp's lanes, its own included
  std::optional<Known> fenced;             // by its last fence: its next atomic writes publish it
  std::map<const Log*, std::size_t> read;  // by atomic reads, so much of the log: its next fence takes it
  Knowledge others;
};

struct Block {
  std::uint32_t number = 0, epoch = 0;
  std::vector<Thread> threads;
  int thread = 0;      // that runs
  Knowledge others;    // that all threads have
  bool apart = false;  // a clock has moved since the barrier

  Thread& me() { return threads[std::size_t(thread)]; }
  const Thread& me() const { return threads[std::size_t(thread)]; }
  Stamp now(std::uint32_t code) const {
    return {code, number, epoch, std::uint16_t(thread), me().clocks[std::size_t(thread % 32)]};
  }
};

// Of the kernel that runs.
struct Kernel {
  const void* code = nullptr;
  std::uint64_t number = 0;
  std::unordered_map<std::uintptr_t, Page*> pages;
  std::unordered_map<std::uintptr_t, Log> logs;
  std::set<std::array<std::uint32_t, 2>> reported;
};

// A page that was looked up; null: memory that no kernel shares.
struct Lookup {
  std::uintptr_t number = 0;
  std::uint64_t kernel = 0;
  Page* page = nullptr;
};

struct Detector {
  static constexpr std::size_t kLookups = 1 << 14;

  bool watching = false;
  Kernel kernel;
  std::vector<std::unique_ptr<Page>> pages;  // the first of them are in use
  std::size_t used = 0;
  std::array<Lookup, kLookups> lookups;
  std::vector<std::string> found;

  ~Detector() {
    if (found.empty()) return;
    std::fprintf(stderr, "emulated GPU: %zu races\n", found.size());
    std::fflush(nullptr);
    _exit(1);
  }
};
Detector& detector() {
  static Detector instance;
  return instance;
}

// Of the kernel's thread that runs. Most accesses go here.
constinit thread_local const char *stack = nullptr, *stack_end = nullptr;

// Of the operating system.
struct ThisThread {
  bool in_kernel = false;
  const char* place = nullptr;  // the emulator's, beside shared memory
  Block block;
  Detector* detector = &races::detector();
  Program program = this_program();
  bool shares(const char* at) const {
    return at >= program.local && at < program.local + program.local_bytes;
  }
  bool watches(const char* at) const { return in_kernel && (at < place || at >= place + sizeof(Place)); }
};
ThisThread& here() {
  thread_local ThisThread mine;
  return mine;
}

bool of_device(const char* at) {
  const auto inside = [&](const auto& blocks) {
    auto block = blocks.upper_bound(const_cast<char*>(at));
    return block != blocks.begin() && (--block, at < block->first + block->second);
  };
  return inside(state().memory) || inside(state().locked);
}

[[gnu::noinline]] Page* look_up(Detector& all, std::uintptr_t number, const char* at, bool shared) {
  const auto [entry, is_new] = all.kernel.pages.try_emplace(number, nullptr);
  if (is_new && (shared || of_device(at))) {
    if (all.used == all.pages.size()) all.pages.push_back(std::make_unique<Page>());
    entry->second = all.pages[all.used++].get();
    entry->second->clear();
  }
  all.lookups[number % Detector::kLookups] = {number, all.kernel.number, entry->second};
  return entry->second;
}

Page* page_of(Detector& all, const char* at, bool shared) {
  const std::uintptr_t number = reinterpret_cast<std::uintptr_t>(at) / Page::kBytes;
  const Lookup& lookup = all.lookups[number % Detector::kLookups];
  const bool known = lookup.number == number && lookup.kernel == all.kernel.number;
  return known ? lookup.page : look_up(all, number, at, shared);
}

// Function, file and line of places in the program, a line or more each, as far as addr2line tells.
std::string places(const std::vector<std::pair<const char*, std::uint32_t>>& code) {
  std::string command = "addr2line -Cfpise /proc/" + std::to_string(getpid()) + "/exe", text;
  char line[4096];
  for (const auto& [name, at] : code) {
    std::snprintf(line, sizeof line, " 0x%x", at - 1);  // inside of the call
    command += line;
  }
  FILE* const lines = popen(command.c_str(), "r");
  for (std::size_t i = 0; lines && std::fgets(line, sizeof line, lines);) {
    if (line[0] != ' ' && i < code.size()) text += std::string("  ") + code[i++].first + ": ";
    text += line;
  }
  if (lines) pclose(lines);
  return text;
}

std::pair<const char*, std::uint32_t> entry_of(const void* kernel) {
  const auto entry = reinterpret_cast<std::uintptr_t>(kernel) - here().program.begin;
  return {"the kernel", std::uint32_t(entry + 1)};
}

[[gnu::noinline]] void report(const char* what, const char* at, std::size_t bytes, bool shared,
                              const Stamp& now, const Stamp& before) {
  Kernel& kernel = detector().kernel;
  if (!kernel.reported.insert({now.code, before.code}).second) return;
  char text[512];
  std::size_t n = std::size_t(std::snprintf(
      text, sizeof text, "%s: %zu bytes of %s memory at %p, by thread %u of block %u", what, bytes,
      shared ? "shared" : "device", static_cast<const void*>(at), now.thread, now.block));
  std::vector<std::pair<const char*, std::uint32_t>> code{entry_of(kernel.code), {"here", now.code}};
  if (before.code != 0) {
    std::snprintf(text + n, sizeof text - n, ", after thread %u of block %u", before.thread, before.block);
    code.push_back({"before", before.code});
  }
  const std::string all = std::string(text) + "\n" + places(code);
  std::fprintf(stderr, "emulated GPU: %s", all.c_str());
  detector().found.push_back(all);
}

// Whether the thread that runs comes after this access.
[[gnu::always_inline]] inline bool ordered(const Block& block, const Stamp& access, bool shared,
                                           bool atomic = false) {
  if (access.code == 0) return true;
  const Thread& me = block.me();
  if (access.block != block.number)  // which had shared memory of its own
    return shared || covers(me.others, access, atomic) || covers(block.others, access, atomic);
  if (access.thread == block.thread || access.epoch < block.epoch) return true;
  return access.thread / 32 == unsigned(block.thread) / 32 && access.clock < me.clocks[access.thread % 32];
}

void note(const Block& block, Cell::Two& two, const Stamp& now, bool shared) {
  auto& [first, second] = two;
  for (Stamp* slot : {&first, &second})
    if (slot->same_thread(now) || ordered(block, *slot, shared)) {
      *slot = now;
      return;
    }
  // A later access of their block may come after both, and not after another block's.
  if (first.block == second.block && first.block != now.block) second = now;
}

bool written_in(const Cell& cell, std::uint32_t block) {
  const auto inside = [&](const Stamp& stamp) { return stamp.code != 0 && stamp.block == block; };
  return inside(cell.write) || inside(cell.atomics[0]);
}

void visit(const Block& block, Cell& cell, const char* at, std::size_t bytes, Access kind, const Stamp& now,
           bool shared) {
  const auto& [first, second] = cell.reads;
  const auto& [one, other] = cell.atomics;
  const auto check = [&](const char* what, const auto&... before) {
    const auto each = [&](const Stamp& stamp) {
      if (!ordered(block, stamp, shared, &stamp == &one || &stamp == &other))
        report(what, at, bytes, shared, now, stamp);
    };
    (each(before), ...);
  };
  switch (kind) {
    case Access::read:
      if (first.same_time(now)) return;
      if (shared && !written_in(cell, now.block))
        report("a read of what nothing has written", at, bytes, shared, now, {});
      check("a race, a read after a write", cell.write);
      check("a race, a read after an atomic operation", one, other);
      return note(block, cell.reads, now, shared);
    case Access::write:
      if (cell.write.same_time(now) && first.code == 0 && one.code == 0) return;
      check("a race, a write after a write", cell.write);
      check("a race, a write after an atomic operation", one, other);
      check("a race, a write after a read", first, second);
      cell = {now, {}, {}};
      return;
    case Access::atomic_read:
    case Access::atomic_write:
      check("a race, an atomic operation after a write", cell.write);
      check("a race, an atomic operation after a read", first, second);
      note(block, cell.atomics, now, shared);
  }
}

void synchronise(const char* at, Access kind) {
  Block& block = here().block;
  Thread& me = block.me();
  if (kind == Access::atomic_write && !me.fenced) return;
  Log& log = detector().kernel.logs[reinterpret_cast<std::uintptr_t>(at)];
  if (kind == Access::atomic_read) {
    if (!log.empty()) me.read[&log] = log.size();
    return;
  }
  log.push_back(*me.fenced);
  for (const Knowledge* others : {&me.others, &block.others})
    for (const auto& [number, known] : *others) log.insert(log.end(), known.begin(), known.end());
}

}  // namespace

void watch() {
  detector().watching = true;
}

std::vector<std::string> take() {
  const std::lock_guard lock(state().mutex);
  detector().kernel.reported.clear();
  return std::exchange(detector().found, {});
}

std::string place_of(const void* kernel) {
  return places({entry_of(kernel)});
}

void begin_kernel(const void* code) {
  Detector& all = detector();
  if (!all.watching) return;
  all.used = 0;
  all.kernel = {code, all.kernel.number + 1, {}, {}, std::move(all.kernel.reported)};
}

void begin_block(std::uint32_t number, std::size_t threads) {
  if (!detector().watching) return;
  here().block = {number, 0, std::vector<Thread>(threads), 0, {}, false};
  here().place = reinterpret_cast<const char*>(&place());
  here().in_kernel = true;
}
void end_block() {
  if (detector().watching) here().in_kernel = false;
}

void run_thread(int thread, const char* its_stack, std::size_t stack_bytes) {
  ThisThread& mine = here();
  if (!mine.detector->watching) return;
  mine.block.thread = thread;
  stack = its_stack, stack_end = its_stack + stack_bytes;
}

void pass_barrier() {
  if (!detector().watching) return;
  Block& block = here().block;
  ++block.epoch;
  if (!block.apart) return;
  for (Thread& thread : block.threads) {
    thread.clocks = {};
    join(block.others, std::exchange(thread.others, {}));
  }
  block.apart = false;
}

void pass_warp_barrier(int warp, unsigned mask) {
  if (!detector().watching) return;
  Block& block = here().block;
  block.apart = true;
  const auto each = [&](const auto& fn) {
    for (std::size_t lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) fn(block.threads[std::size_t(warp) * 32 + lane], lane);
  };
  Clocks joint{};
  Knowledge others;
  each([&](Thread& thread, std::size_t) {
    for (std::size_t l = 0; l < 32; ++l) joint[l] = std::max(joint[l], thread.clocks[l]);
    join(others, thread.others);
  });
  each([&](Thread&, std::size_t lane) { ++joint[lane]; });
  each([&](Thread& thread, std::size_t) { thread.clocks = joint, thread.others = others; });
}

namespace {

[[gnu::noinline]] void look_at(const char* at, std::size_t bytes, Access kind, const void* code) {
  ThisThread& mine = here();
  if (!mine.watches(at)) return;
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  const Stamp now =
      mine.block.now(std::uint32_t(reinterpret_cast<std::uintptr_t>(code) - mine.program.begin));
  const int shift = (address | bytes) % 4 == 0 ? 2 : (address | bytes) % 2 == 0 ? 1 : 0;
  const bool shared = mine.shares(at);
  for (std::size_t done = 0; done < bytes;) {
    Page* const page = page_of(*mine.detector, at + done, shared);
    const std::size_t in_page = (address + done) % Page::kBytes;
    const std::size_t here_bytes = std::min(bytes - done, Page::kBytes - in_page);
    if (page) {
      if (!shared && !has_awaited()) report("an access before await_previous()", at, bytes, shared, now, {});
      if (page->shift > shift) page->split(shift);
      Cell* const cells = page->cells.data();
      for (std::size_t c = in_page >> page->shift; c <= (in_page + here_bytes - 1) >> page->shift; ++c)
        visit(mine.block, cells[c], at, bytes, kind, now, shared);
    }
    done += here_bytes;
  }
  if (kind == Access::atomic_read || kind == Access::atomic_write) synchronise(at, kind);
}

}  // namespace

void access(const void* data, std::size_t bytes, Access kind, const void* code) {
  const auto* at = static_cast<const char*>(data);
  if (at < stack || at >= stack_end) look_at(at, bytes, kind, code);
}

void fence() {
  if (!here().in_kernel) return;
  Block& block = here().block;
  Thread& me = block.me();
  block.apart = true;
  for (const auto& [log, size] : std::exchange(me.read, {}))
    for (std::size_t i = 0; i < size; ++i) add(me.others, (*log)[i]);
  ++me.clocks[std::size_t(block.thread % 32)];
  me.fenced = Known{block.number, block.epoch, std::uint16_t(block.thread / 32), me.clocks};
}

}  // namespace topknot::emulator::races
