#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "dist/launch/launch.h"
#include "dist/rendezvous/tcp_store.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/base/text.h"

extern char** environ;

namespace topknot {
namespace {

constexpr auto kSameRequest = std::chrono::milliseconds(100);  // as install_stop_handlers()
// For the ranks to end after one of them gave up its waiting, or after a second stop signal.
constexpr double kLastWordsSeconds = 0.3;
// For other ranks that die with one, until the rest goes on.
constexpr double kMoreDeathsSeconds = 0.1;

// Blocks the signals that the supervisor handles one by one, in this thread and those that it starts, while
// it lives. SIGCHLD has its default action meanwhile: if it is ignored, as a parent may leave it, nobody can
// wait for a child.
class SignalGate {
 public:
  SignalGate() {
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &standard, &child_before_);
    sigemptyset(&taken_);
    sigaddset(&taken_, SIGCHLD);
    for (const int signal : kStopSignals) sigaddset(&taken_, signal);
    pthread_sigmask(SIG_BLOCK, &taken_, &before_);
  }
  ~SignalGate() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    sigaction(SIGCHLD, &child_before_, nullptr);
  }
  const sigset_t& taken() const { return taken_; }
  const sigset_t& before() const { return before_; }
  // 0 when nothing came in time.
  int next(std::chrono::milliseconds timeout) const {
    const timespec time{timeout.count() / 1000, timeout.count() % 1000 * 1000000};
    const int signal = sigtimedwait(&taken_, nullptr, &time);
    return signal > 0 ? signal : 0;
  }

 private:
  sigset_t taken_{}, before_{};
  struct sigaction child_before_ {};
};

class Children {
 public:
  ~Children() { kill_all(SIGKILL, true); }

  void start(int rank, const std::vector<std::string>& environment, char* const* argv,
             const SignalGate& gate) {
    std::vector<char*> pointers;
    for (const auto& entry : environment) pointers.push_back(const_cast<char*>(entry.c_str()));
    pointers.push_back(nullptr);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &gate.before());
    // One process group each: Ctrl-C reaches the launcher alone, which passes it on once.
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
    pid_t pid = 0;
    const int error = posix_spawn(&pid, "/proc/self/exe", nullptr, &attributes, argv, pointers.data());
    posix_spawnattr_destroy(&attributes);
    if (error != 0)
      throw UserError(fmt::format(
          "cannot start rank {} ({}){}", rank, std::strerror(error),
          error == EAGAIN ? "; raise the limit of processes (ulimit -u), or lower dist.ranks" : ""));
    pids_.resize(std::max(pids_.size(), static_cast<std::size_t>(rank) + 1));
    pids_[static_cast<std::size_t>(rank)] = pid;
  }

  int alive() const { return static_cast<int>(running().size()); }

  std::vector<int> running() const {  // ranks, ascending
    std::vector<int> ranks;
    for (std::size_t r = 0; r < pids_.size(); ++r)
      if (pids_[r] > 0) ranks.push_back(static_cast<int>(r));
    return ranks;
  }

  void kill_one(int rank) {
    if (pids_[static_cast<std::size_t>(rank)] > 0) kill(pids_[static_cast<std::size_t>(rank)], SIGKILL);
  }

  void kill_all(int signal, bool and_wait = false) {
    for (pid_t& pid : pids_) {
      if (pid <= 0) continue;
      kill(pid, signal);
      if (and_wait) {
        waitpid(pid, nullptr, 0);
        pid = 0;
      }
    }
  }

  // A child that ended: its rank and status.
  bool reap(int& rank, int& status) {
    for (std::size_t r = 0; r < pids_.size(); ++r)
      if (pids_[r] > 0 && waitpid(pids_[r], &status, WNOHANG) == pids_[r]) {
        pids_[r] = 0;
        rank = static_cast<int>(r);
        return true;
      }
    return false;
  }

 private:
  std::vector<pid_t> pids_;
};

// 128 random bits: another job's ranks do not have them.
std::string random_token() {
  unsigned char bytes[16];
  TOPKNOT_CHECK(getrandom(bytes, sizeof bytes, 0) == sizeof bytes, "no random bytes could be had");
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

// `proof`: a file that the copies inherit. `joins_after`: LaunchPlan's.
std::vector<std::string> environment_of(int rank, int size, int port, const std::string& token, int proof,
                                        int joins_after = 0, const std::string& run = "") {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (std::strncmp(*entry, "TOPKNOT_", 8) != 0) result.push_back(*entry);
  result.push_back(fmt::format("TOPKNOT_RANK={}", rank));
  result.push_back(fmt::format("TOPKNOT_RANKS={}", size));
  result.push_back(fmt::format("TOPKNOT_MASTER=127.0.0.1:{}", port));
  result.push_back(fmt::format("TOPKNOT_PARENT={}", getpid()));
  result.push_back("TOPKNOT_LAUNCH=" + file_name(proof));
  result.push_back("TOPKNOT_TOKEN=" + token);
  result.push_back(fmt::format("TOPKNOT_JOINS_AFTER={}", joins_after));
  result.push_back("TOPKNOT_RUN=" + run);
  return result;
}

// Views are lines "NUMBER PORT RANK RANK ...\n" in the file that the copies inherit. Lines are added only, and the newline
// comes last, so a reader sees whole ones. A view without ranks says that the run ends. A line that begins with '+' is of
// a view that waits for its last rank, and for nobody else's eyes.
void publish(const View& view, int file, const char* prefix = "") {
  const std::string line =
      fmt::format("{}{} {} {}\n", prefix, view.number, view.port, fmt::join(view.ranks, " "));
  const off_t end = lseek(file, 0, SEEK_END);
  TOPKNOT_CHECK(pwrite(file, line.data(), line.size(), end) == static_cast<ssize_t>(line.size()),
                "the ranks could not be told who goes on: " + errno_text());
}

// The newest one; the first view if there is none. `joining`: only of those with this rank, and the end.
View newest_view(int file, int joining = -1) {
  std::string text;
  char bytes[4096];
  for (ssize_t n; (n = pread(file, bytes, sizeof bytes, static_cast<off_t>(text.size()))) > 0;)
    text.append(bytes, static_cast<std::size_t>(n));
  text.resize(text.rfind('\n') + 1);
  View newest;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const bool waits = line.front() == '+';
    std::istringstream words(line.substr(waits));
    View view;
    words >> view.number >> view.port;
    for (int rank; words >> rank;) view.ranks.push_back(rank);
    if (joining < 0 ? !waits : view.ranks.empty() || std::ranges::count(view.ranks, joining) > 0)
      newest = std::move(view);
  }
  return newest;
}

// The rendezvous of the views, in the launcher.
class ViewServer {
 public:
  // `file`: the inherited one.
  ViewServer(const LaunchPlan& plan, const DistOptions& options, const std::string& token, int file)
      : options_(options), token_(token), file_(file) {
    for (int r = 0; r < plan.size; ++r) view_.ranks.push_back(r);
    open(plan.port);
  }

  TcpStoreServer& store() { return *stores_.back(); }
  int number() const { return view_.number; }
  int last_number() const { return last_number_; }  // of an invitation too
  const std::vector<int>& ranks() const { return view_.ranks; }
  std::vector<int> missing() {  // ranks that have not come to the newest view; one alone need not
    if (view_.ranks.size() == 1) return {};
    std::vector<int> ranks = store().missing();
    for (int& rank : ranks) rank = view_.ranks[static_cast<std::size_t>(rank)];
    return ranks;
  }
  // One of these ranks that the others wait for in vain, and why; -1: none.
  std::pair<int, std::string> hanging(const std::vector<int>& running) {
    const std::vector<int> late = missing();
    if (admitted_ && late.size() + 1 == view_.ranks.size()) joining_ = Patience(options_.timeout_s);
    if (!late.empty() && joining_.over() && view_.number > 1)
      return {late.front(), fmt::format("did not come to view {} in time", view_.number)};
    // Who is on the way to a view is heard in the one before.
    const std::size_t heard = stores_.size() - (late.empty() ? 1 : 2);
    if (heard >= stores_.size()) return {-1, ""};
    std::vector<int> places;
    for (const int rank : late.empty() ? running : late)
      if (const auto place = std::ranges::find(members_[heard], rank); place != members_[heard].end())
        places.push_back(static_cast<int>(place - members_[heard].begin()));
    const int place = stores_[heard]->frozen(places, late.empty());
    if (place < 0) return {-1, ""};
    return {members_[heard][static_cast<std::size_t>(place)],
            fmt::format("hung: silent for more than {:g} s", TcpStoreServer::kFrozenSeconds)};
  }

  void next(std::vector<int> ranks, const std::string& reason) {
    uninvite(reason);
    if (admitted_) stores_[stores_.size() - 2]->abort(reason);
    store().abort(reason);
    view_.ranks = std::move(ranks), view_.number = ++last_number_;
    open(0);
    view_.port = store().port();
    publish(view_, file_);
  }

  // A view with one more rank, which is to come before the others hear of it.
  bool invited() const { return invited_.has_value(); }
  void invite(int rank) {
    invited_ = View{++last_number_, view_.ranks, 0};
    invited_->ranks.push_back(rank);
    if (guests_.size() > 1) guests_.erase(guests_.begin());  // of long ago
    guests_.push_back(make_store(0, invited_->ranks.size(), 0));
    invited_->port = guests_.back()->port();
    publish(*invited_, file_, "+");
  }
  void uninvite(const std::string& reason) {
    if (invited_) guests_.back()->abort(reason);  // for a rank that comes later, too
    invited_.reset();
  }
  bool guest_came() const { return invited_ && guests_.back()->missing().size() < invited_->ranks.size(); }
  void admit() {
    view_ = *std::exchange(invited_, std::nullopt);
    take(std::move(guests_.back()));
    guests_.pop_back();
    admitted_ = true;
    publish(view_, file_);
  }
  void end() { publish({++last_number_, {}, 0}, file_); }

 private:
  std::unique_ptr<TcpStoreServer> make_store(int port, std::size_t ranks, double timeout_s) const {
    return std::make_unique<TcpStoreServer>("127.0.0.1", port, static_cast<int>(ranks), timeout_s, token_);
  }
  void open(int port) {
    take(make_store(port, view_.ranks.size(), options_.timeout_s));
    admitted_ = false;
  }
  void take(std::unique_ptr<TcpStoreServer> store) {
    stores_.push_back(std::move(store));
    members_.push_back(view_.ranks);
    constexpr std::size_t kInUse = 2;
    if (stores_.size() > kInUse) stores_[stores_.size() - kInUse - 1]->abort("a later view has begun");
    if (stores_.size() > 2 * kInUse) stores_[stores_.size() - 2 * kInUse - 1].reset();
    joining_ = Patience(options_.timeout_s);
  }

  const DistOptions& options_;
  const std::string token_;
  const int file_;
  View view_;
  int last_number_ = view_.number;
  std::optional<View> invited_;
  bool admitted_ = false;  // the newest view has a rank that was invited; the others come in their own time
  Patience joining_;
  std::vector<std::unique_ptr<TcpStoreServer>> stores_;  // by view; earlier ones tell their ranks the reason
  std::vector<std::vector<int>> members_;                // their ranks
  std::vector<std::unique_ptr<TcpStoreServer>> guests_;  // of views that were invited to
};

bool is_stop_signal(int signal) {
  return std::count(std::begin(kStopSignals), std::end(kStopSignals), signal) > 0;
}

// A rank that ended other than with exit code 0.
struct Failure {
  int rank, status;
  bool killed;  // by a signal that did not come from here, or because it hung
  std::string why = {};
  // By a stop signal that it alone was sent: kLeaves after a step, else as any program.
  bool left(bool all_stop = false) const {
    return WIFEXITED(status) &&
           (WEXITSTATUS(status) == kLeaves || (!all_stop && is_stop_signal(WEXITSTATUS(status) - 128)));
  }
  // Not a fault that others may have too.
  bool lone(bool all_stop) const { return killed || left(all_stop); }
  int code() const { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }
  std::string text() const {
    if (!why.empty()) return fmt::format("rank {} {}", rank, why);
    if (left()) return fmt::format("rank {} left", rank);
    if (!WIFSIGNALED(status))
      return fmt::format("rank {} ended with exit code {}", rank, WEXITSTATUS(status));
    const int signal = WTERMSIG(status);
    return fmt::format("rank {} died: killed by signal {} ({})", rank, signal, strsignal(signal));
  }
};

// The failure that caused the others: of a rank that something else killed, else of the rank that gave the
// store its first reason, else the first that was seen. `failures` has one at least.
const Failure& cause(const std::vector<Failure>& failures, int first_rank) {
  for (const auto& failure : failures)
    if (failure.killed) return failure;
  for (const auto& failure : failures)
    if (failure.rank == first_rank) return failure;
  return failures.front();
}

}  // namespace

Rejoin make_rejoin(const LaunchPlan& plan, const DistOptions& options) {
  const char* name = std::getenv("TOPKNOT_LAUNCH");
  TOPKNOT_CHECK(plan.launcher == "spawn" && name,
                "only a rank that run_spawned() started joins another view");
  const int file = std::atoi(name);
  const auto join = [plan, options, file](View& view) -> std::unique_ptr<Communicator> {
    constexpr double kAnnounced = 30;  // seconds
    const bool joins = view.ranks.empty();
    const double after_stop_s =
        joins ? 0 : 2;  // others have the run's state, which a stop signal is not to lose
    Patience patience(joins ? 0 : kAnnounced);
    std::optional<Patience> stopping;
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      const View next = newest_view(file, joins ? plan.rank : -1);
      if (next.number > view.number) {
        view.number = next.number;
        const auto place = std::find(next.ranks.begin(), next.ranks.end(), plan.rank);
        if (place == next.ranks.end()) return nullptr;
        LaunchPlan joined = plan;
        joined.rank = static_cast<int>(place - next.ranks.begin());
        joined.size = static_cast<int>(next.ranks.size());
        joined.port = next.port;
        joined.meeting = {.unlimited = joins, .after_stop_s = after_stop_s};
        auto communicator = join_group(joined, options);
        view = next;
        return communicator;
      }
      if (stop_signal() != 0 && !stopping) stopping.emplace(after_stop_s);
      if (stopping && stopping->left() <= 0)
        throw Interrupted(
            fmt::format("stopped by {} while the other ranks were to go on", signal_name(stop_signal())));
      if (patience.over()) throw UserError("a collective failed, and no rank has died");
    }
  };
  // The file is read only if lines were added.
  const auto announced = [file, size = off_t{0}, newest = 1](int number) mutable {
    if (const off_t now = lseek(file, 0, SEEK_END); now != std::exchange(size, now))
      newest = newest_view(file).number;
    return newest > number;
  };
  return {join, announced};
}

std::unique_ptr<Communicator> join_run(const LaunchPlan& plan, const DistOptions& options, View& view) {
  end_with_launcher();
  if (process_environment()("TOPKNOT_RUN") != options.run)
    throw UserError(
        "the configuration or the data are others than when the run began; it goes on without this rank");
  const Rejoin rejoin = make_rejoin(plan, options);
  view = {plan.joins_after, {}, 0};
  for (;;) try {
      return rejoin.join(view);
    } catch (const CollectiveError& error) {
      log_debug(fmt::format("view {} did not come about: {}", view.number, error.what()));
    }
}

int run_spawned(const LaunchPlan& plan, const DistOptions& options, char* const* argv, double grace_s,
                const std::function<void()>& on_ready) {
  TOPKNOT_CHECK(plan.kind == LaunchPlan::Kind::spawn, "this process is a rank, not a launcher");
  const SignalGate gate;
  const std::string token = options.token.empty() ? random_token() : options.token;
  const Fd proof(memfd_create("topknot-ranks", 0));
  TOPKNOT_CHECK(proof.valid(), "no file for the ranks to inherit: " + errno_text());
  ViewServer views(plan, options, token, proof.get());
  if (on_ready) {
    // Until there are ranks to look after, a stop signal ends this process at once: on_ready() may hang in a
    // file system.
    pthread_sigmask(SIG_SETMASK, &gate.before(), nullptr);
    on_ready();
    pthread_sigmask(SIG_BLOCK, &gate.taken(), nullptr);
  }
  Children children;
  const auto start = [&](int rank, int joins_after) {
    children.start(
        rank,
        environment_of(rank, plan.size, views.store().port(), token, proof.get(), joins_after, options.run),
        argv, gate);
  };
  for (int r = 0; r < plan.size; ++r) start(r, 0);

  std::vector<Failure> failures;  // in the order in which they were seen
  bool failed = false;            // and the ranks were told of the first one
  int stopping = 0;               // the signal that was passed on: ranks may end with a code of their own
  Clock::time_point stopped_at;   // when
  bool killing = false;
  std::string hanging;  // the message about a rank that goes on after the others
  // For ranks that end in order: they may have something to write; 0 is no limit.
  const double in_order = options.timeout_s > 0 ? std::max(grace_s, options.timeout_s) : 0;
  std::optional<Patience> terminate, kill;  // until SIGTERM and SIGKILL
  const auto sooner = [](std::optional<Patience>& limit, double seconds) {
    if (!limit || !limit->limited() || limit->left() > seconds) limit.emplace(seconds);
  };
  // Of an elastic run: ranks that the others are to go on without, and until then; ranks that are done.
  std::vector<Failure> lost;
  std::optional<Patience> regroup;
  int done = 0;
  // Ranks that died and may be started again, and how often; the one that was and has not joined yet.
  std::vector<int> gone;
  int respawns = options.respawns;
  std::optional<int> guest;
  std::map<int, std::string> hung;  // ranks that were killed for it
  const auto is_missing = [&](int rank) {
    const std::vector<int> missing = views.missing();
    return std::count(missing.begin(), missing.end(), rank) > 0;
  };
  const auto go_on = [&] {
    regroup.reset();
    std::vector<int> left = views.ranks();
    const std::vector<int> running = children.running();
    std::erase_if(left, [&](int rank) { return rank == guest || std::ranges::count(running, rank) == 0; });
    // A rank ends in order after all have agreed that the run is done.
    if ((done == 0 && static_cast<int>(left.size()) < options.min_ranks) || !failures.empty()) {
      failures.insert(failures.begin(), lost.begin(), lost.end());
    } else {
      std::string reason;
      for (const Failure& one : lost) reason += (reason.empty() ? "" : "; ") + one.text();
      if (left.empty()) return log_warning(reason + ", when the run was done");
      if (reason.empty()) reason = "a rank was done before the others";
      views.next(left, reason);
      for (const Failure& one : lost)
        if (!one.left()) gone.push_back(one.rank);
      log_warning(fmt::format("{}; elastic.min_ranks: {} on, as view {}", reason,
                              left.size() == 1 ? fmt::format("rank {} goes", left.front())
                                               : fmt::format("ranks {} go", fmt::join(left, ", ")),
                              views.number()));
    }
    lost.clear();
  };
  while (children.alive() > 0) {
    const int signal = gate.next(std::chrono::milliseconds(regroup ? 20 : 100));
    if (signal != 0 && signal != SIGCHLD) {
      if (stopping && Clock::now() - stopped_at < kSameRequest) continue;
      children.kill_all(signal);
      if (stopping) sooner(kill, kLastWordsSeconds);
      if (!stopping) stopped_at = Clock::now(), stopping = signal;
    }
    // A rank gave up instead of agreeing with the others on a step.
    if (stopping && !kill && options.min_ranks == 0 && !views.store().first_reason().empty())
      kill.emplace(kLastWordsSeconds);
    int rank, status;
    while (children.reap(rank, status)) {
      if (rank == guest) {
        views.uninvite("the rank that was to join has ended");
        const Failure failure{rank, status, WIFSIGNALED(status), hung[rank]};
        hung.erase(rank);
        if (std::ranges::count(views.ranks(), rank) > 0) {  // the others may be on their way to its view
          lost.push_back(failure);
          regroup.emplace(kMoreDeathsSeconds);
        } else {
          if (!failed && !stopping && done == 0) log_warning(failure.text() + " before it had joined");
          gone.push_back(rank);
        }
        guest.reset();
        continue;
      }
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        if (in_order > 0) sooner(terminate, in_order);
        ++done;
        if (views.number() > 1 && !failed && !regroup && is_missing(rank))
          regroup.emplace(kMoreDeathsSeconds);
        continue;
      }
      const bool passed_on = stopping && WIFSIGNALED(status) && is_stop_signal(WTERMSIG(status));
      const Failure failure{rank, status, WIFSIGNALED(status) && !killing && !passed_on, hung[rank]};
      hung.erase(rank);
      const bool met = views.number() > 1 || views.store().missing().empty();
      if (options.min_ranks > 0 && failure.lone(stopping != 0) && met && !killing && failures.empty()) {
        lost.push_back(failure);
        regroup.emplace(kMoreDeathsSeconds);
      } else {
        failures.push_back(failure);
      }
    }
    if (options.min_ranks > 0) {
      if (const auto [rank, why] = failed ? std::pair(-1, std::string()) : views.hanging(children.running());
          rank >= 0 && hung.try_emplace(rank, why).second)
        children.kill_one(rank);
      if (regroup && (regroup->over() || children.alive() == 0 || !failures.empty())) go_on();
      if (guest && (done > 0 || children.alive() == 1)) children.kill_one(*guest);
      if (!regroup && !stopping && !failed && done == 0 && views.missing().empty()) {
        if (guest && std::ranges::count(views.ranks(), *guest) > 0) guest.reset();  // all have come
        if (!guest && !gone.empty() && respawns > 0) {
          --respawns;
          guest = gone.front();
          gone.erase(gone.begin());
          start(*guest, views.last_number());
        } else if (guest && !views.invited()) {
          views.invite(*guest);
        } else if (views.guest_came()) {
          views.admit();
          log_info(fmt::format("rank {} is to join, as view {}", *guest, views.number()));
        }
      }
    }
    if (!failed && !failures.empty()) {
      failed = true;
      if (options.min_ranks > 0) views.end();
      if (!stopping) views.store().abort(cause(failures, views.store().first_reason_rank()).text());
      terminate.emplace(stopping ? in_order : grace_s);
    }
    if (terminate && terminate->over()) {
      if (failures.empty() && children.alive() > 0)
        hanging = fmt::format("rank {} did not end within {:g} s after the others",
                              children.running().front(), in_order);
      children.kill_all(SIGTERM);
      killing = true;
      terminate.reset();
      kill.emplace(2);
    }
    if (kill && kill->over()) {
      children.kill_all(SIGKILL);
      killing = true;
    }
  }
  if (failures.empty()) return 0;
  const TcpStoreServer& store = views.store();
  const Failure& failure = cause(failures, store.first_reason_rank());
  // A reason that a rank gave itself says more than how its process ended; that of a rank which had to be
  // killed is known.
  const bool told = store.reason_by_rank() && (!failure.killed || store.first_reason_rank() == failure.rank);
  if (!stopping || failure.killed || told)
    log_error("the run has ended; first error: " + (!hanging.empty() ? hanging
                                                    : told           ? store.first_reason()
                                                                     : failure.text()));
  // A rank that had to be killed after a stop signal ends because of that.
  return stopping && !failure.killed && WIFSIGNALED(failure.status) ? 128 + stopping : failure.code();
}

}  // namespace topknot
