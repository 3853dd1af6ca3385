// Journals after kills: cut and damaged files, and which files of a model stay.
#include "espalier/serve/journal.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/serve/run_journal.h"

namespace espalier::serve {
namespace {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "journal-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::string read_text(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_text(const std::filesystem::path& file, const std::string& text) {
  std::ofstream(file, std::ios::binary) << text;
}

const std::vector<std::string> kRecords{"first", "", std::string("with\0zero", 9), std::string(100'000, 'x'), "last"};

void write_records(const std::filesystem::path& file) {
  Journal journal(file, false);
  for (const std::string& record : kRecords)
    journal.append(record.substr(0, record.size() / 2), record.substr(record.size() / 2));
}

TEST(Journal, RecordsComeBackInTheirOrder) {
  const TemporaryDirectory folder;
  EXPECT_TRUE(read_journal(folder / "none").empty());
  write_records(folder / "journal");
  EXPECT_EQ(read_journal(folder / "journal"), kRecords);
}

TEST(Journal, ACutFileKeepsItsWholeRecordsAndGoesOn) {
  const TemporaryDirectory folder;
  write_records(folder / "journal");
  const std::string whole = read_text(folder / "journal");
  for (const std::size_t end : {whole.size() - 1, whole.size() - 4, whole.size() - 5, std::size_t{200}, std::size_t{20},
                                std::size_t{13}, std::size_t{9}, std::size_t{3}, std::size_t{0}}) {
    write_text(folder / "cut", whole.substr(0, end));
    std::vector<std::string> expected = read_journal(folder / "cut");
    EXPECT_LT(expected.size(), kRecords.size()) << end;
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), kRecords.begin())) << end;
    expected.emplace_back("more");
    Journal(folder / "cut", true).append("more");
    EXPECT_EQ(read_journal(folder / "cut"), expected) << end;
  }
}

TEST(Journal, NothingBehindDamageIsTakenForARecord) {
  const TemporaryDirectory folder;
  write_records(folder / "journal");
  const std::string whole = read_text(folder / "journal");
  for (std::size_t at = 0; at < 60; ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x55);
    write_text(folder / "damaged", damaged);
    const std::vector<std::string> left = read_journal(folder / "damaged");
    EXPECT_LT(left.size(), kRecords.size()) << at;
    EXPECT_TRUE(std::equal(left.begin(), left.end(), kRecords.begin())) << at;
  }
}

TEST(Journal, AFileThatCannotBeWrittenIsNamed) {
  const TemporaryDirectory folder;
  EXPECT_THROW(Journal(folder / "no/such/folder", false), WriteError);
}

HttpRequest request(const std::string& body) {
  HttpRequest out;
  out.method = "POST", out.path = "/api/v1/optim_step";
  out.headers = {{"content-type", "application/json"}, {"x-api-key", "tml-secret"}};
  out.body = body;
  return out;
}

struct RunJournalFiles : ::testing::Test {
  TemporaryDirectory folder;
  RunJournal journal{folder / "run", false};

  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder / "run"), {}));
  }
  RunJournal::Past past() const { return RunJournal(folder / "run", false).read(); }
};

TEST_F(RunJournalFiles, RequestsAndResultsComeBack) {
  journal.add_request(2, request("two"));
  journal.add_request(1, request("one\nwith a line"));
  journal.add_result(1, protobuf_result(std::string("bytes\n\0", 7)), {1, 2});
  journal.add_result(2, error_result("no", "user"), {1, 2});
  const RunJournal::Past found = past();
  ASSERT_EQ(found.requests.size(), 2u);
  EXPECT_EQ(found.requests.at(1).body, "one\nwith a line");
  EXPECT_EQ(found.requests.at(1).path, "/api/v1/optim_step");
  EXPECT_EQ(found.requests.at(1).header("content-type"), "application/json");
  EXPECT_EQ(found.requests.at(1).header("x-api-key"), "");  // keys are not written to the disk
  EXPECT_EQ(*found.results.at(1).body, std::string("bytes\n\0", 7));
  EXPECT_TRUE(found.results.at(1).is_protobuf);
  EXPECT_TRUE(found.results.at(2).failed);
  EXPECT_EQ(found.joined.at(1).last, 2);
  EXPECT_EQ(found.joined.at(2).first, 1);
  EXPECT_EQ(read_text(folder / "run/journal.0").find("tml-secret"), std::string::npos);
}

TEST_F(RunJournalFiles, FilesGoWhenTheStateHasTheirRequestsAndNobodyAsksForTheirResults) {
  const auto never = [](std::int64_t) { return false; };
  journal.add_request(1, request("one"));
  journal.add_request(3, request("early"));
  journal.add_result(1, json_result("{}"), {1, 1});
  journal.begin_next(2);  // the third request came before this state, but runs after it
  journal.prune(never);
  journal.add_request(4, request("four"));
  EXPECT_EQ(files(), 2u);
  EXPECT_EQ(past().requests.size(), 3u);
  journal.begin_next(3);
  journal.prune([](std::int64_t number) { return number == 1; });
  EXPECT_EQ(past().results.size(), 1u);
  journal.prune(never);
  EXPECT_EQ(past().requests.size(), 1u);
  EXPECT_EQ(past().requests.begin()->first, 4);
}

TEST_F(RunJournalFiles, ARestartedServerGoesOnInTheSameFiles) {
  journal.add_request(1, request("one"));
  RunJournal again(folder / "run", false);
  EXPECT_EQ(again.read().requests.size(), 1u);
  again.add_request(2, request("two"));
  EXPECT_EQ(past().requests.size(), 2u);
  again.begin_next(2);
  again.add_request(3, request("three"));
  again.prune([](std::int64_t) { return false; });
  EXPECT_EQ(past().requests.size(), 1u);
  again.remove();
  EXPECT_TRUE(past().requests.empty());
}

}  // namespace
}  // namespace espalier::serve
