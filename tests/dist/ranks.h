#pragma once
// Runs a body on every rank of a group: `threads`, `link`, which is threads over an emulated link, or `gloo`
// whose ranks are threads of the test, each with connections of its own.

#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/comm/communicator.h"
#include "dist/rendezvous/tcp_store.h"

namespace topknot {

struct RanksOptions {
  double timeout_s = 60;
  bool check_calls = true;
};

// What each rank threw, "" where nothing.
inline std::vector<std::string> errors_of_ranks(const std::string& backend, int ranks,
                                                const std::function<void(Communicator&)>& body,
                                                RanksOptions options = {}) {
  std::vector<std::string> errors(ranks);
  std::vector<std::unique_ptr<Communicator>> group(ranks);
  std::unique_ptr<TcpStoreServer> store;
  if (backend == "gloo")
    store = std::make_unique<TcpStoreServer>("127.0.0.1", 0, ranks, options.timeout_s);
  else
    group = make_thread_group(
        ranks, options.timeout_s,
        backend == "link" ? std::optional(make_emulated_link("10gbit", "1us", 1)) : std::nullopt);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        if (store) {
          JoinOptions gloo;
          gloo.rank = r;
          gloo.size = ranks;
          gloo.port = store->port();
          gloo.timeout_s = options.timeout_s;
          gloo.check_calls = options.check_calls;
          group[r] = make_gloo_communicator(gloo);
        }
        body(*group[r]);
      } catch (const std::exception& error) {
        errors[r] = error.what();
        if (errors[r].empty()) errors[r] = "an error without text";
        if (group[r]) group[r]->abort(errors[r]);
      }
      group[r].reset();
    });
  for (auto& thread : threads) thread.join();
  return errors;
}

// For bodies that must not throw.
inline void run_ranks(const std::string& backend, int ranks, const std::function<void(Communicator&)>& body,
                      RanksOptions options = {}) {
  for (const auto& error : errors_of_ranks(backend, ranks, body, options))
    if (!error.empty()) throw std::runtime_error(error);
}

}  // namespace topknot
