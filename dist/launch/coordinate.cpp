#include "dist/launch/coordinate.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "dist/launch/supervise.h"
#include "nn/base/log.h"
#include "nn/base/program.h"

namespace topknot {
namespace {

// Keys that the coordinator tells. `views`: lines. `start`: after which view this rank joins, 0 if it begins; and the
// run. `stop`: how often all were told to, and the last signal.
constexpr const char *kViews = "views", *kStart = "start", *kStop = "stop", *kRun = "run";

class Members : public Ranks {
 public:
  Members(const HostPort& where, int ranks, const std::string& token)
      : server_(where.host, where.port, ranks, token, TcpStoreServer::Members()) {}

  // Until all are here. Those that go before that may come again. False: a stop signal came, or time is over.
  bool wait_for(std::size_t ranks, const SignalGate& gate, double timeout_s, std::string& why) {
    for (Patience patience(timeout_s); running_.size() < ranks;) {
      const int signal = gate.next(std::chrono::milliseconds(20));
      next_ended();
      running_.insert(running_.end(), waiting_.begin(), waiting_.end());
      waiting_.clear();
      std::ranges::sort(running_);
      if (signal != 0 && signal != SIGCHLD) stop_ = signal, why = "stopped by " + signal_name(signal);
      if (patience.over())
        why = fmt::format("only {} of {} ranks came within dist.timeout_s ({:g} s)", running_.size(), ranks,
                          timeout_s);
      if (!why.empty()) return false;
    }
    return true;
  }
  int stop() const { return stop_; }

  void publish(const std::string& line) { server_.tell(-1, kViews, views_ += line); }
  void begin() {
    for (const int rank : running_) server_.tell(rank, kStart, "0");
  }
  void dismiss_all(const std::string& why) { server_.dismiss(-1, why); }

  std::vector<int> running() const override { return running_; }

  std::optional<Ending> next_ended() override {
    while (const auto event = server_.next_event()) {
      const int rank = event->rank;
      if (event->kind == event->came) waiting_.push_back(rank);
      if (event->kind == event->said && event->text.starts_with(std::string(kRun) + '\0'))
        run_ = event->text.substr(event->text.find('\0') + 1);
      if (event->kind != event->left && event->kind != event->lost) continue;
      std::erase(waiting_, rank);
      if (std::erase(running_, rank) == 0) continue;
      if (event->kind == event->left) return Ending{rank, std::atoi(event->text.c_str())};
      if (stops_ > 0) return Ending{rank, 128 + stop_};
      return Ending{rank, 0, SIGKILL, "died (its connection to the coordinator closed without a message)"};
    }
    return {};
  }

  void signal_all(int signal) override {
    if (signal == SIGKILL) return dismiss_all("the run has ended without this rank");
    stop_ = signal;
    server_.tell(-1, kStop, fmt::format("{} {}", ++stops_, signal));
  }
  void kill_one(int rank, const std::string& why) override {
    server_.dismiss(rank, "the run goes on without this rank, which " + why);
  }
  bool begun() const override { return !run_.empty(); }
  std::optional<int> newcomer(std::vector<int>&, int after) override {
    if (waiting_.empty()) return {};
    const int rank = waiting_.front();
    waiting_.erase(waiting_.begin());
    running_.insert(std::ranges::upper_bound(running_, rank), rank);
    server_.tell(rank, kStart, fmt::format("{} {}", after, run_));
    return rank;
  }

 private:
  TcpStoreServer server_;
  std::string views_, run_;
  std::vector<int> running_;  // ascending
  std::vector<int> waiting_;  // came, and have no part in the run
  int stop_ = 0, stops_ = 0;
};

}  // namespace

int coordinate(const HostPort& where, int ranks, const DistOptions& options, double grace_s) {
  const SignalGate gate;
  const std::string token = options.token.empty() ? job_token("", process_environment()) : options.token;
  Members members(where, ranks, token);
  log_info(fmt::format("awaiting {} ranks, dist.master={}", ranks, host_port_text(where.host, where.port)));
  if (std::string why; !members.wait_for(static_cast<std::size_t>(ranks), gate, options.timeout_s, why)) {
    members.dismiss_all("the run did not begin: " + why);
    if (members.stop() != 0) throw Interrupted(why, members.stop());
    throw UserError(why + "; start as many as dist.ranks says, with elastic.min_ranks and this dist.master");
  }
  ViewServer views(where.host, 0, ranks, options, token,
                   [&](const std::string& line) { members.publish(line); });
  views.publish();
  members.begin();
  log_info(fmt::format("all {} ranks are here", ranks));
  const int code = supervise(members, views, gate, options, grace_s);
  members.dismiss_all("the run has ended");  // ranks that were to join
  return code;
}

Member::Member(LaunchPlan& plan, const DistOptions& options) {
  TOPKNOT_CHECK(plan.coordinated, "this rank has no coordinator");
  const std::string where = host_port_text(plan.host, plan.port);
  const std::string hint =
      fmt::format(" (with elastic.min_ranks, 'train --coordinate {}' runs there)", where);
  try {
    connection_ =
        std::make_shared<TcpStoreClient>(plan.host, plan.port, plan.rank, -plan.size, options.timeout_s,
                                         options.token.empty() ? plan.token : options.token);
  } catch (const CollectiveError& error) {
    throw CollectiveError(error.what() + hint);
  } catch (const UserError& error) {
    throw UserError(error.what() + hint);
  }
  set_exit_code(1);
  // The coordinator gives up first and says why, also on a rank that joins before this one.
  const std::string start =
      connection_->get(kStart, Patience(2 * options.timeout_s + 5 * (options.timeout_s > 0)));
  char* rest = nullptr;
  plan.joins_after = static_cast<int>(std::strtol(start.c_str(), &rest, 10));
  plan.run = *rest == ' ' ? rest + 1 : "";
  plan.views = [connection = connection_, where] {
    if (const std::string why = connection->first_reason({}); !why.empty())
      throw UserError(
          fmt::format("the coordinator at {}: {}; if the run has ended, train --resume goes on from "
                      "its last checkpoint",
                      where, why));
    return connection->known(kViews);
  };
  if (plan.joins_after == 0) plan.port = first_port(plan.views());
  // The coordinator's signals are this process's, each once.
  connection_->on_tick([connection = connection_.get(), taken = std::make_shared<int>(0)] {
    const std::string stop = connection->known(kStop);
    char* signal = nullptr;
    const int count = static_cast<int>(std::strtol(stop.c_str(), &signal, 10));
    if (count <= *taken) return;
    if (std::exchange(*taken, count) == 0) return pass_stop_on(std::atoi(signal));
    kill(getpid(), std::atoi(signal));
  });
}

void Member::tell_run(const std::string& fingerprint) {
  connection_->set(kRun, fingerprint);
}

void Member::set_exit_code(int code) {
  connection_->set_last_words(std::to_string(code));
}

}  // namespace topknot
