#include "espalier/tasks/task.h"

#include <algorithm>
#include <utility>

#include "espalier/base/error.h"

namespace espalier {
namespace {

// Tokens of the parts of each task.
constexpr std::int64_t kFact = 3, kFactQuestion = 2;
constexpr std::int64_t kLeastNames = 8, kMostNames = 12, kLeastRecited = 4, kReciteQuestion = 2;
constexpr std::int64_t kFirstSum = 4, kSum = 8, kSumQuestion = 5;
constexpr std::int64_t kLineFrame = 3, kLeastLineWords = 12, kMostLineWords = 24, kCopyQuestion = 7;

std::int64_t below(Random& random, std::int64_t count) { return random.integer(0, count - 1); }

std::int32_t draw(Random& random, Vocabulary::Range range) { return range.at(below(random, range.count)); }

template <class T>
void shuffle(std::vector<T>& items, Random& random) {
  for (std::size_t i = items.size(); i > 1; --i)
    std::swap(items[i - 1], items[static_cast<std::size_t>(below(random, static_cast<std::int64_t>(i)))]);
}

std::vector<std::int32_t> shuffled_names(const Vocabulary& words, Random& random) {
  std::vector<std::int32_t> names;
  for (std::int32_t i = 0; i < words.names().count; ++i) names.push_back(words.names().at(i));
  shuffle(names, random);
  return names;
}

// A text to ask about: its tokens, and every question about it with its answer.
struct Document {
  TokenIds ids;
  std::vector<Problem> questions;  // prompt_ids: the question alone
};

// Sentences of a document with a fixed number of tokens; `next` makes them until one no longer fits.
class Sentences {
 public:
  explicit Sentences(std::int64_t length) : left_(length) {}

  bool add(TokenIds sentence) {
    const auto size = static_cast<std::int64_t>(sentence.size());
    if (size > left_) return false;
    left_ -= size;
    sentences_.push_back(std::move(sentence));
    return true;
  }
  std::int64_t left() const { return left_; }

  // Fills up with words that mean nothing, in sentences of 4 to 7 tokens and a last one of what is left.
  void fill(const Vocabulary& words, Random& random) {
    while (left_ > 0) {
      const std::int64_t length = std::min(left_, random.integer(4, 7));
      TokenIds sentence;
      for (std::int64_t i = 1; i < length; ++i) sentence.push_back(draw(random, words.fillers()));
      sentence.push_back(words.id(";"));
      add(std::move(sentence));
    }
  }
  void mix(Random& random) { shuffle(sentences_, random); }
  TokenIds joined() const {
    TokenIds ids;
    for (const TokenIds& sentence : sentences_) ids.insert(ids.end(), sentence.begin(), sentence.end());
    return ids;
  }

 private:
  std::int64_t left_;
  std::vector<TokenIds> sentences_;
};

// Facts take three quarters of the document, at least two, at most as many as there are names.
Document retrieval(const Vocabulary& words, std::int64_t prompt_length, Random& random) {
  Document out;
  Sentences sentences(prompt_length - kFactQuestion);
  std::int64_t facts = std::max<std::int64_t>(2, sentences.left() * 3 / 4 / kFact);
  for (const std::int32_t name : shuffled_names(words, random)) {
    if (facts-- == 0) break;
    const std::int32_t colour = draw(random, words.colours());
    sentences.add({name, colour, words.id(";")});
    out.questions.push_back({{words.id("?"), name}, {colour}});
  }
  sentences.fill(words, random);
  sentences.mix(random);
  out.ids = sentences.joined();
  return out;
}

// Lines of names, each name in one line at most, so that every name but the last of a line tells the next one.
Document recital(const Vocabulary& words, std::int64_t prompt_length, Random& random) {
  Document out;
  Sentences sentences(prompt_length - kReciteQuestion);
  const std::vector<std::int32_t> names = shuffled_names(words, random);
  std::int64_t used = 0;
  for (;;) {
    const std::int64_t left = std::min(static_cast<std::int64_t>(names.size()) - used, sentences.left() - 1);
    if (left < kLeastNames) break;
    const auto begin = names.begin() + used;
    TokenIds line(begin, begin + std::min(left, random.integer(kLeastNames, kMostNames)));
    used += static_cast<std::int64_t>(line.size());
    for (auto asked = line.begin(); line.end() - asked > kLeastRecited; ++asked)
      out.questions.push_back({{words.id("?"), *asked}, {asked + 1, line.end()}});
    line.push_back(words.id(";"));
    sentences.add(std::move(line));
  }
  sentences.fill(words, random);
  sentences.mix(random);
  out.ids = sentences.joined();
  return out;
}

// The chain stands in its order; what it leaves of the document comes before it.
Document arithmetic(const Vocabulary& words, std::int64_t prompt_length, Random& random) {
  const auto digit = [&](std::int64_t value) { return words.digits().at(value); };
  const std::vector<std::int32_t> names = shuffled_names(words, random);
  const std::int64_t room = prompt_length - kSumQuestion;
  const std::int64_t count =
      std::min<std::int64_t>(1 + (room - kFirstSum) / kSum, static_cast<std::int64_t>(names.size()));
  const std::int32_t is = words.id("="), plus = words.id("+"), stop = words.id(";");
  Document out;
  Sentences filling(room - kFirstSum - (count - 1) * kSum);
  filling.fill(words, random);
  out.ids = filling.joined();
  std::int64_t value = below(random, 10);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t name = names[static_cast<std::size_t>(i)];
    TokenIds sentence{name, is, digit(value), stop};
    if (i > 0) {
      const std::int64_t added = below(random, 10);
      value = (value + added) % 10;
      sentence = {name, is, names[static_cast<std::size_t>(i) - 1], plus, digit(added), is, digit(value), stop};
    }
    out.ids.insert(out.ids.end(), sentence.begin(), sentence.end());
    const std::int64_t asked = below(random, 10);
    out.questions.push_back({{words.id("?"), name, plus, digit(asked), is}, {digit((value + asked) % 10)}});
  }
  return out;
}

// Lines of a name and words, one of which the question replaces wherever it stands in the line.
Document copying(const Vocabulary& words, std::int64_t prompt_length, Random& random) {
  Document out;
  Sentences sentences(prompt_length - kCopyQuestion);
  const std::int64_t shortest = std::min(kLeastLineWords, sentences.left() - kLineFrame);
  for (const std::int32_t name : shuffled_names(words, random)) {
    const std::int64_t most = std::min(kMostLineWords, sentences.left() - kLineFrame);
    if (most < shortest) break;
    TokenIds line(static_cast<std::size_t>(random.integer(shortest, most)));
    for (std::int32_t& word : line) word = draw(random, words.fillers());
    const std::int32_t old_word = line[static_cast<std::size_t>(below(random, static_cast<std::int64_t>(line.size())))];
    const std::int32_t new_word = draw(random, words.colours());
    TokenIds sentence{name, words.id(":")}, answer = line;
    sentence.insert(sentence.end(), line.begin(), line.end());
    sentence.push_back(words.id(";"));
    sentences.add(std::move(sentence));
    std::ranges::replace(answer, old_word, new_word);
    out.questions.push_back(
        {{words.id("?"), words.id("copy"), name, words.id("with"), new_word, words.id("for"), old_word}, answer});
  }
  sentences.fill(words, random);
  sentences.mix(random);
  out.ids = sentences.joined();
  return out;
}

Document document_of(const Task& task, Random& random) {
  const Vocabulary& words = Vocabulary::built_in();
  if (task.kind == TaskKind::arithmetic) return arithmetic(words, task.prompt_length, random);
  if (task.kind == TaskKind::copy) return copying(words, task.prompt_length, random);
  if (task.kind == TaskKind::recite) return recital(words, task.prompt_length, random);
  return retrieval(words, task.prompt_length, random);
}

}  // namespace

Split split_of(std::span<const std::int32_t> prompt_ids) {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const std::int32_t id : prompt_ids) hash = (hash ^ static_cast<std::uint32_t>(id)) * 0x100000001b3u;
  return (hash >> 32) % 8 == 0 ? Split::held_out : Split::train;
}

std::vector<Problem> Task::problems(Split split, Random random, std::int64_t most) const {
  if (prompt_length < shortest_prompt())
    throw OptionError({"--prompt-length", text_of("at least ", shortest_prompt(), " tokens for ", name_of(kind)),
                       text_of(prompt_length), ""});
  for (;;) {  // a document may have no question of this split; then another is made
    Document document = document_of(*this, random);
    shuffle(document.questions, random);
    std::vector<Problem> out;
    for (Problem& question : document.questions) {
      if (static_cast<std::int64_t>(out.size()) == most) break;
      TokenIds prompt = document.ids;
      prompt.insert(prompt.end(), question.prompt_ids.begin(), question.prompt_ids.end());
      ESPALIER_INTERNAL_EQ(static_cast<std::int64_t>(prompt.size()), prompt_length);
      if (split_of(prompt) == split) out.push_back({std::move(prompt), std::move(question.answer_ids)});
    }
    if (!out.empty()) return out;
  }
}

std::int64_t Task::shortest_prompt() const {
  if (kind == TaskKind::arithmetic) return kSumQuestion + kFirstSum + kSum;
  if (kind == TaskKind::copy) return kCopyQuestion + 2 * (kLineFrame + kLeastLineWords);
  if (kind == TaskKind::recite) return kReciteQuestion + 2 * (kLeastNames + 1);
  return kFactQuestion + 2 * kFact;
}

std::int64_t Task::longest_answer() const {
  return (kind == TaskKind::copy ? kMostLineWords : kind == TaskKind::recite ? kMostNames - 1 : 1) + 1;
}

double answer_score(std::span<const std::int32_t> response_ids, std::span<const std::int32_t> answer_ids) {
  const std::int32_t end = Vocabulary::built_in().end();
  const auto stop = std::ranges::find(response_ids, end);
  const auto given = static_cast<std::size_t>(stop - response_ids.begin());
  const std::size_t places = std::max(given, answer_ids.size()) + (stop == response_ids.end() ? 1 : 0);
  std::size_t right = 0;
  for (std::size_t i = 0; i < std::min(given, answer_ids.size()); ++i) right += response_ids[i] == answer_ids[i];
  return static_cast<double>(right) / static_cast<double>(places);
}

}  // namespace espalier
