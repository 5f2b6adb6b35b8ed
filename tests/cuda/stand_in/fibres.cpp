// The threads of a block as fibres of one thread of the operating system. A fibre runs until it waits for its
// warp or its block; when no fibre can run, whoever waits for a full warp or block goes on.
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <ucontext.h>

#include "tests/cuda/stand_in/machine.h"

namespace topknot::stand_in {
namespace {

constexpr std::size_t kStack = 128 << 10;

enum class Wait { nothing, warp, block, finished };

struct Fibre {
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t entry{};
  jmp_buf at;
  bool started = false;
  Wait wait = Wait::finished;
  uint3 thread{};
  unsigned mask = 0;
  std::uint64_t word = 0;
  std::uint64_t seen[32];  // what the warp brought
  int predicate = 0, any = 0;
};

struct Block {
  std::vector<std::unique_ptr<Fibre>> fibres;
  Place place;
  Fibre* current = nullptr;
  int index = 0;
  const std::function<void()>* body = nullptr;
  jmp_buf scheduler;
};

thread_local Block block;

[[noreturn]] void broken(const char* what) {
  // A kernel that would hang or be undefined on a GPU; there is no way on from inside it.
  std::fprintf(stderr, "stand-in GPU: %s (block %u, %zu threads)\n", what, block.place.block.x,
               block.fibres.size());
  std::abort();
}

void pause(Fibre& me) {
  if (_setjmp(me.at) == 0) _longjmp(block.scheduler, 1);
}

void main_of_fibre() {
  for (;;) {
    Fibre& me = *block.current;
    (*block.body)();
    me.wait = Wait::finished;
    pause(me);
  }
}

void resume(Fibre& fibre, int index) {
  block.current = &fibre;
  block.index = index;
  block.place.thread = fibre.thread;
  if (_setjmp(block.scheduler) != 0) return;
  if (fibre.started) _longjmp(fibre.at, 1);
  fibre.started = true;
  getcontext(&fibre.entry);
  fibre.entry.uc_stack.ss_sp = fibre.stack.get();
  fibre.entry.uc_stack.ss_size = kStack;
  fibre.entry.uc_link = nullptr;
  makecontext(&fibre.entry, main_of_fibre, 0);
  setcontext(&fibre.entry);
}

// Lets the lanes go on whose whole mask waits. True where there were any.
bool release_warps(int threads) {
  bool released = false;
  for (int first = 0; first < threads; first += 32) {
    for (int l = 0; l < 32 && first + l < threads; ++l) {
      Fibre& fibre = *block.fibres[first + l];
      if (fibre.wait != Wait::warp) continue;
      const unsigned mask = fibre.mask;
      if (!(mask >> l & 1)) broken("a lane waits with a mask that leaves it out");
      bool complete = true;
      for (int other = 0; other < 32; ++other) {
        if (!(mask >> other & 1)) continue;
        if (first + other >= threads) continue;  // lanes that the block does not have
        const Fibre& theirs = *block.fibres[first + other];
        if (theirs.wait == Wait::finished) broken("a lane of the mask has ended");
        complete = complete && theirs.wait == Wait::warp && theirs.mask == mask;
      }
      if (!complete) continue;
      for (int to = 0; to < 32 && first + to < threads; ++to) {
        if (!(mask >> to & 1)) continue;
        Fibre& receiver = *block.fibres[first + to];
        for (int from = 0; from < 32; ++from)
          receiver.seen[from] =
              mask >> from & 1 && first + from < threads ? block.fibres[first + from]->word : 0;
      }
      for (int to = 0; to < 32 && first + to < threads; ++to)
        if (mask >> to & 1) block.fibres[first + to]->wait = Wait::nothing;
      released = true;
    }
  }
  return released;
}

void run_block(int threads) {
  const bool reverse = machine().reverse;
  for (int i = 0; i < threads; ++i) {
    Fibre& fibre = *block.fibres[i];
    fibre.wait = Wait::nothing;
    const auto x = static_cast<unsigned>(i) % block.place.block_size.x;
    const auto rest = static_cast<unsigned>(i) / block.place.block_size.x;
    fibre.thread = {x, rest % block.place.block_size.y, rest / block.place.block_size.y};
  }
  for (;;) {
    bool ran = false;
    for (int i = 0; i < threads; ++i) {
      const int at = reverse ? threads - 1 - i : i;
      Fibre& fibre = *block.fibres[at];
      if (fibre.wait != Wait::nothing) continue;
      resume(fibre, at);
      ran = true;
    }
    if (ran) continue;
    if (release_warps(threads)) continue;
    int waiting = 0, any = 0;
    for (int i = 0; i < threads; ++i) {
      if (block.fibres[i]->wait == Wait::warp)
        broken("lanes of a warp wait for others that wait for the block");
      if (block.fibres[i]->wait == Wait::block) ++waiting, any |= block.fibres[i]->predicate;
    }
    if (waiting == 0) return;
    for (int i = 0; i < threads; ++i)
      if (block.fibres[i]->wait == Wait::block)
        block.fibres[i]->wait = Wait::nothing, block.fibres[i]->any = any;
  }
}

}  // namespace

const Place& place() {
  return block.place;
}

int lane() {
  return block.index % 32;
}

void block_barrier() {
  block_or(0);
}

int block_or(int predicate) {
  Fibre& me = *block.current;
  me.predicate = predicate != 0;
  me.wait = Wait::block;
  pause(me);
  return me.any;
}

const std::uint64_t* warp_exchange(unsigned mask, std::uint64_t mine) {
  Fibre& me = *block.current;
  me.mask = mask;
  me.word = mine;
  me.wait = Wait::warp;
  pause(me);
  return me.seen;
}

void run_kernel(dim3 grid, dim3 size, const std::function<void()>& body) {
  const int threads = static_cast<int>(size.x * size.y * size.z);
  while (block.fibres.size() < static_cast<std::size_t>(threads))
    block.fibres.push_back(std::make_unique<Fibre>());
  block.body = &body;
  block.place.block_size = size;
  block.place.grid_size = grid;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::uint64_t b = machine().reverse ? blocks - 1 - i : i;
    block.place.block = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                         static_cast<unsigned>(b / grid.x / grid.y)};
    run_block(threads);
  }
}

}  // namespace topknot::stand_in
