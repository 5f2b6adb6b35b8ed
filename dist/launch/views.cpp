#include "dist/launch/views.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <thread>

#include "nn/base/log.h"
#include "nn/base/program.h"

namespace topknot {
namespace {

// Views are lines "NUMBER PORT RANK RANK ...\n", which are added only. A view without ranks says that the run ends. A
// line that begins with '+' is of a view that waits for its last rank, and for nobody else's eyes.
std::string line_of(const View& view, const char* prefix = "") {
  return fmt::format("{}{} {} {}\n", prefix, view.number, view.port, fmt::join(view.ranks, " "));
}

// The newest one; the first view if there is none. `joining`: only of those with this rank, and the end.
View newest_view(const std::string& text, int joining = -1) {
  View newest;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line) && !lines.eof();) {
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

}  // namespace

ViewServer::ViewServer(std::string host, int port, int ranks, const DistOptions& options, std::string token,
                       std::function<void(const std::string&)> publish)
    : host_(std::move(host)), options_(options), token_(std::move(token)), publish_(std::move(publish)) {
  for (int r = 0; r < ranks; ++r) view_.ranks.push_back(r);
  open(port);
}

std::vector<int> ViewServer::missing() {
  if (view_.ranks.size() == 1) return {};
  std::vector<int> ranks = store().missing();
  for (int& rank : ranks) rank = view_.ranks[static_cast<std::size_t>(rank)];
  return ranks;
}

std::pair<int, std::string> ViewServer::hanging(const std::vector<int>& running) {
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

void ViewServer::publish() const {
  publish_(line_of(view_));
}

void ViewServer::next(std::vector<int> ranks, const std::string& reason) {
  uninvite(reason);
  if (admitted_) stores_[stores_.size() - 2]->abort(reason);
  store().abort(reason);
  view_.ranks = std::move(ranks), view_.number = ++last_number_;
  open(0);
  publish();
}

void ViewServer::invite(int rank) {
  invited_ = View{++last_number_, view_.ranks, 0};
  invited_->ranks.push_back(rank);
  if (guests_.size() > 1) guests_.erase(guests_.begin());  // of long ago
  guests_.push_back(make_store(0, invited_->ranks.size(), 0));
  invited_->port = guests_.back()->port();
  publish_(line_of(*invited_, "+"));
}

void ViewServer::uninvite(const std::string& reason) {
  if (invited_) guests_.back()->abort(reason);  // for a rank that comes later, too
  invited_.reset();
}

void ViewServer::admit() {
  view_ = *std::exchange(invited_, std::nullopt);
  take(std::move(guests_.back()));
  guests_.pop_back();
  admitted_ = true;
  publish();
}

void ViewServer::end() {
  publish_(line_of({++last_number_, {}, 0}));
}

std::unique_ptr<TcpStoreServer> ViewServer::make_store(int port, std::size_t ranks, double timeout_s) const {
  return std::make_unique<TcpStoreServer>(host_, port, static_cast<int>(ranks), timeout_s, token_);
}

void ViewServer::open(int port) {
  take(make_store(port, view_.ranks.size(), options_.timeout_s));
  view_.port = store().port();
  admitted_ = false;
}

void ViewServer::take(std::unique_ptr<TcpStoreServer> store) {
  stores_.push_back(std::move(store));
  members_.push_back(view_.ranks);
  constexpr std::size_t kInUse = 2;
  if (stores_.size() > kInUse) stores_[stores_.size() - kInUse - 1]->abort("a later view has begun");
  if (stores_.size() > 2 * kInUse) stores_[stores_.size() - 2 * kInUse - 1].reset();
  joining_ = Patience(options_.timeout_s);
}

Rejoin make_rejoin(const LaunchPlan& plan, const DistOptions& options) {
  TOPKNOT_CHECK(plan.views, "nobody tells this rank of views");
  const auto join = [plan, options](View& view) -> std::unique_ptr<Communicator> {
    constexpr double kAnnounced = 30;  // seconds
    const bool joins = view.ranks.empty();
    const double after_stop_s =
        joins ? 0 : 2;  // others have the run's state, which a stop signal is not to lose
    Patience patience(joins ? 0 : kAnnounced);
    std::optional<Patience> stopping;
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      const View next = newest_view(plan.views(), joins ? plan.rank : -1);
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
  // The text is read only if lines were added.
  const auto announced = [views = plan.views, size = std::size_t{0}, newest = 1](int number) mutable {
    const std::string text = views();
    if (text.size() != std::exchange(size, text.size())) newest = newest_view(text).number;
    return newest > number;
  };
  return {join, announced};
}

std::unique_ptr<Communicator> join_run(const LaunchPlan& plan, const DistOptions& options, View& view) {
  if (plan.launcher == "spawn") end_with_launcher();
  if (plan.run != options.run)
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

int first_port(const std::string& views) {
  return newest_view(views).port;
}

}  // namespace topknot
