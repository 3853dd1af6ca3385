// Files and directories that are complete or absent.
#include "espalier/checkpoint/atomic_output.h"

#include <sys/wait.h>
#include <unistd.h>

#include "espalier/base/atomic_file.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier::test {
namespace {

namespace fs = std::filesystem;

// The id of a process that has ended.
pid_t dead_process() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ::waitpid(child, nullptr, 0);
  return child;
}

TEST(AtomicFile, IsAbsentUntilCommitAndCompleteAfter) {
  const TemporaryDirectory folder;
  AtomicFile file(folder / "a.jsonl");
  file.write("one\n");
  EXPECT_FALSE(fs::exists(folder / "a.jsonl"));
  file.write("two\n", 4);
  file.commit();
  EXPECT_EQ(read_text(folder / "a.jsonl"), "one\ntwo\n");
  EXPECT_EQ(entries_in(folder.path()), 1u);
}

TEST(AtomicFile, LeavesTheOldFileAndNothingElseWithoutCommit) {
  const TemporaryDirectory folder;
  write_text(folder / "a", "old");
  {
    AtomicFile file(folder / "a");
    file.write("new");
    EXPECT_EQ(entries_in(folder.path()), 2u);
  }
  EXPECT_EQ(read_text(folder / "a"), "old");
  EXPECT_EQ(entries_in(folder.path()), 1u);
}

TEST(AtomicFile, TwoWritersOfOneTargetDoNotDisturbEachOther) {
  const TemporaryDirectory folder;
  AtomicFile one(folder / "a"), two(folder / "a");
  one.write("one");
  two.write("two");
  one.commit();
  EXPECT_EQ(read_text(folder / "a"), "one");
  two.commit();
  EXPECT_EQ(read_text(folder / "a"), "two");
  EXPECT_EQ(entries_in(folder.path()), 1u);
}

TEST(AtomicFile, ReplacesTheFileBehindALinkAndKeepsItsMode) {
  const TemporaryDirectory folder;
  write_text(folder / "real", "old");
  fs::permissions(folder / "real", fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("real", folder / "link");
  AtomicFile file(folder / "link");
  file.write("new");
  file.commit();
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_text(folder / "real"), "new");
  EXPECT_EQ(fs::status(folder / "real").permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST(AtomicFile, AFullDeviceIsAnErrorThatSaysSo) {
  AtomicFile file("/dev/full");
  file.write("text");
  const std::string text = message_of<OptionError>([&] { file.commit(); });
  EXPECT_HOLDS(text, "/dev/full");
  EXPECT_HOLDS(text, "No space left on device");
}

TEST(AtomicFile, NamesAMissingDirectory) {
  const TemporaryDirectory folder;
  EXPECT_HOLDS(message_of<OptionError>([&] { AtomicFile file(folder / "no" / "file"); }), "No such file or directory");
  EXPECT_HOLDS(message_of<OptionError>([&] { AtomicFile file(folder.path()); }), "Is a directory");
  EXPECT_THROW(AtomicFile(""), OptionError);
}

TEST(AtomicDirectory, IsAbsentUntilCommitAndMarkedAfter) {
  const TemporaryDirectory folder;
  AtomicDirectory out(folder / "out/");
  write_text(out.path() / "a", "text");
  EXPECT_FALSE(fs::exists(folder / "out"));
  out.commit();
  EXPECT_EQ(read_text(folder / "out" / "a"), "text");
  EXPECT_TRUE(is_espalier_output(folder / "out"));
  EXPECT_EQ(entries_in(folder.path()), 1u);
}

TEST(AtomicDirectory, ReplacesItsOwnOutputAsAWhole) {
  const TemporaryDirectory folder;
  for (const std::string round : {"one", "two", "three"}) {
    AtomicDirectory out(folder / "out");
    EXPECT_TRUE(fs::is_empty(out.path()));
    write_text(out.path() / round, round);
    out.commit();
    EXPECT_EQ(entries_in(folder / "out"), 2u);  // this round's file and espalier/
    EXPECT_EQ(read_text(folder / "out" / round), round);
    EXPECT_EQ(entries_in(folder.path()), 1u);
  }
}

TEST(AtomicDirectory, LeavesNothingWithoutCommit) {
  const TemporaryDirectory folder;
  {
    AtomicDirectory out(folder / "out");
    fs::create_directories(out.path() / "deep" / "er");
    write_text(out.path() / "deep" / "er" / "a", "text");
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(AtomicDirectory, RefusesWhatEspalierDidNotWrite) {
  const TemporaryDirectory folder;
  fs::create_directory(folder / "thesis");
  write_text(folder / "thesis" / "chapter.txt", "years");
  EXPECT_HOLDS(message_of<OptionError>([&] { check_output_directory(folder / "thesis"); }), "Choose another name");
  EXPECT_THROW(AtomicDirectory(folder / "thesis"), OptionError);
  fs::create_directory(folder / "thesis" / "espalier");  // a folder of that name is no proof
  EXPECT_THROW(check_output_directory(folder / "thesis"), OptionError);
  write_text(folder / "file", "text");
  EXPECT_HOLDS(message_of<OptionError>([&] { check_output_directory(folder / "file"); }), "got a file");
  EXPECT_EQ(read_text(folder / "thesis" / "chapter.txt"), "years");
}

TEST(AtomicDirectory, RefusesAtCommitWhatAppearedMeanwhile) {
  const TemporaryDirectory folder;
  {
    AtomicDirectory out(folder / "out");
    fs::create_directory(folder / "out");
    write_text(folder / "out" / "note", "mine");
    EXPECT_THROW(out.commit(), OptionError);
  }
  EXPECT_EQ(read_text(folder / "out" / "note"), "mine");
  EXPECT_EQ(entries_in(folder.path()), 1u);
}

TEST(AtomicDirectory, RefusesBadPlaces) {
  const TemporaryDirectory folder;
  EXPECT_HOLDS(message_of<OptionError>([&] { check_output_directory(folder / "no" / "out"); }), "no directory");
  EXPECT_THROW(check_output_directory(""), OptionError);
  EXPECT_THROW(check_output_directory("/"), OptionError);
  EXPECT_HOLDS(message_of<OptionError>([&] { check_output_directory("/proc"); }), "a mount point");
  EXPECT_THROW(check_output_directory("/proc/espalier-out"), OptionError);
  EXPECT_THROW(check_output_directory(folder / std::string(250, 'x')), OptionError);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(AtomicDirectory, AcceptsAnEmptyDirectoryAndALinkToOne) {
  const TemporaryDirectory folder;
  fs::create_directory(folder / "real");
  fs::create_directory_symlink("real", folder / "link");
  AtomicDirectory out(folder / "link");
  write_text(out.path() / "a", "text");
  out.commit();
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_text(folder / "real" / "a"), "text");
}

TEST(AtomicDirectory, RemovesLeftoversOfTheDeadAndSparesTheLiving) {
  const TemporaryDirectory folder;
  const fs::path dead = folder / (".out.espalier-partial-" + std::to_string(dead_process()));
  fs::create_directory(dead);
  write_text(dead / "half", "text");
  const fs::path other = folder / (".another.espalier-partial-" + std::to_string(dead_process()));
  fs::create_directory(other);
  AtomicDirectory living(folder / "out");
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_TRUE(fs::exists(other));  // of another target
  check_output_directory(folder / "out");
  EXPECT_TRUE(fs::exists(living.path()));
}

TEST(AtomicDirectory, PutsBackWhatAKillBetweenTwoRenamesLeft) {
  const TemporaryDirectory folder;
  {
    AtomicDirectory out(folder / "out");
    write_text(out.path() / "a", "old");
    out.commit();
  }
  fs::rename(folder / "out", folder / ".out.espalier-previous");
  check_output_directory(folder / "out");
  EXPECT_EQ(read_text(folder / "out" / "a"), "old");
  EXPECT_EQ(entries_in(folder.path()), 1u);
}

// Root ignores permissions, so the tests of permissions give that up for a while.
class WithoutRoot {
 public:
  WithoutRoot() : was_root_(::geteuid() == 0), changed_(was_root_ && ::seteuid(65534) == 0) {}
  ~WithoutRoot() {
    if (changed_ && ::seteuid(0) != 0) ADD_FAILURE() << "cannot become root again";
  }
  bool holds() const { return !was_root_ || changed_; }

 private:
  bool was_root_, changed_;
};

TEST(AtomicDirectory, NamesAReadOnlyParent) {
  const TemporaryDirectory folder;
  write_text(folder / "a", "old");
  constexpr auto kReadOnly = static_cast<fs::perms>(0555);
  fs::permissions(folder.path(), kReadOnly);
  {
    const WithoutRoot user;
    if (!user.holds()) GTEST_SKIP() << "root ignores permissions and cannot be given up here";
    EXPECT_HOLDS(message_of<OptionError>([&] { check_output_directory(folder / "out"); }), "Permission denied");
    EXPECT_HOLDS(message_of<OptionError>([&] { AtomicFile file(folder / "a"); }),
                 "Choose a place with write permission");
  }
  fs::permissions(folder.path(), fs::perms::owner_all);
  EXPECT_EQ(entries_in(folder.path()), 1u);
}

TEST(ClaimedDirectory, IsOneRunsAndReplacesOnlyWhenToldTo) {
  const TemporaryDirectory folder;
  {
    const ClaimedDirectory first(folder / "out", false);
    EXPECT_HOLDS(message_of<OptionError>([&] { ClaimedDirectory second(folder / "out", true); }), "no other process");
    AtomicDirectory(folder / "out").commit();
  }
  EXPECT_EQ(entries_in(folder.path()), 1u);
  EXPECT_HOLDS(message_of<OptionError>([&] { ClaimedDirectory again(folder / "out", false); }), "--overwrite");
  EXPECT_NO_THROW(ClaimedDirectory again(folder / "out", true));
}

TEST(ClaimedDirectory, ALockThatAKilledProcessLeftHoldsNobodyBack) {
  const TemporaryDirectory folder;
  write_text(folder / ".out.espalier-partial-lock", "");
  EXPECT_NO_THROW(ClaimedDirectory out(folder / "out", false));
  EXPECT_EQ(entries_in(folder.path()), 0u);
}

TEST(DiskSpace, OfAllOutputsOnOneFileSystemIsAskedForTogether) {
  const TemporaryDirectory folder;
  const auto free_bytes = static_cast<std::int64_t>(fs::space(folder.path()).available);
  EXPECT_NO_THROW(require_disk_space({{folder / "a", 1}, {folder / "not" / "there" / "b", 1}}));
  const std::int64_t most = free_bytes / 10 * 6;
  EXPECT_NO_THROW(require_disk_space({{folder / "a", most}}));
  EXPECT_HOLDS(message_of<OptionError>([&] {
                 require_disk_space({{folder / "a", most}, {folder / "b", most}});
               }),
               "free space");
}

}  // namespace
}  // namespace espalier::test
