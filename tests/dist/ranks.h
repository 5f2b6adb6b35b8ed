#pragma once
// Runs a body on every rank of a group: `threads`, `link`, which is threads over an emulated link, or `gloo`
// whose ranks are threads of the test, each with connections of its own.

#include "dist/comm/communicator.h"
#include "dist/rendezvous/tcp_store.h"
#include "tests/support/test.h"
#include "tests/support/threads.h"

namespace topknot {

struct RanksOptions {
  double timeout_s = 60;
  bool check_calls = true;
  EmulatedLink link = make_emulated_link("10gbit", "1us", 1);  // of the backend `link`
};

inline JoinOptions join_options(int rank, int size, int port, double timeout_s = 300) {
  JoinOptions options;
  options.rank = rank, options.size = size, options.port = port, options.timeout_s = timeout_s;
  return options;
}

// What each rank threw, "" where nothing.
inline std::vector<std::string> errors_of_ranks(const std::string& backend, int ranks, RanksOptions options,
                                                const std::function<void(Communicator&)>& body) {
  std::vector<std::unique_ptr<Communicator>> group(ranks);
  std::unique_ptr<TcpStoreServer> store;
  if (backend == "gloo")
    store = std::make_unique<TcpStoreServer>("127.0.0.1", 0, ranks, options.timeout_s);
  else
    group = make_thread_group(ranks, options.timeout_s,
                              backend == "link" ? std::optional(options.link) : std::nullopt);
  return testing::errors_of_threads(ranks, [&](int r) {
    try {
      if (store) {
        JoinOptions gloo = join_options(r, ranks, store->port(), options.timeout_s);
        gloo.check_calls = options.check_calls;
        group[r] = make_gloo_communicator(gloo);
      }
      body(*group[r]);
    } catch (const std::exception& error) {
      const std::string text = *error.what() ? error.what() : "an error without text";
      if (group[r]) group[r]->abort(text);
      group[r].reset();
      throw std::runtime_error(text);
    }
    group[r].reset();
  });
}

inline std::vector<std::string> errors_of_ranks(const std::string& backend, int ranks,
                                                const std::function<void(Communicator&)>& body) {
  return errors_of_ranks(backend, ranks, {}, body);
}

// For bodies that must not throw.
inline void run_ranks(const std::string& backend, int ranks, RanksOptions options,
                      const std::function<void(Communicator&)>& body) {
  for (const auto& error : errors_of_ranks(backend, ranks, options, body))
    if (!error.empty()) throw std::runtime_error(error);
}
inline void run_ranks(const std::string& backend, int ranks, const std::function<void(Communicator&)>& body) {
  run_ranks(backend, ranks, {}, body);
}

inline const std::vector<std::string> kBackends = {"threads", "link", "gloo"};

// Catch2's macros are for the test's own thread: `body` says on each rank's what it expects.
using Expect = std::function<void(bool holds, const std::string& what)>;
inline void check_ranks(const std::string& backend, int ranks, RanksOptions options,
                        const std::function<void(Communicator&, const Expect&)>& body) {
  std::mutex mutex;
  std::set<std::string> wrong;
  run_ranks(backend, ranks, options, [&](Communicator& c) {
    body(c, [&](bool holds, const std::string& what) {
      const std::lock_guard lock(mutex);
      if (!holds) wrong.insert("rank " + std::to_string(c.rank()) + ": " + what);
    });
  });
  INFO(backend << " with " << ranks << " ranks");
  CHECK(wrong == std::set<std::string>());
}

}  // namespace topknot
