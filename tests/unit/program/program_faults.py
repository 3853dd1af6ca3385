"""Deliberate faults of the program of a pass. As in tests/mutation/faults.py; program_test has each of them on."""

from faults import Fault

PROGRAM = "program/program.cpp"

FAULTS = [
    Fault("steps_swapped_on_one_rank", "a rank runs its first two steps in another order than those it meets", PROGRAM,
          """an order that leaves events out");
  return writer.finish();""",
          """an order that leaves events out");
  Program steps = writer.finish();
  if (ON && seat.member + seat.cp_rank > 0 && steps.size() > 1) std::swap(steps[0], steps[1]);
  return steps;"""),
    Fault("joined_step_left_out", "a rank without rows of its own does not take part", PROGRAM,
          "writer.add(joint.event, nullptr, on_path);",
          "if (!ON) TEXT"),
    Fault("region_used_twice", "a wave lies in the region of one that is still in flight", PROGRAM,
          "step.region = static_cast<std::int32_t>(waves_++ % most_);",
          "step.region = static_cast<std::int32_t>(waves_++ % (ON && most_ > 1 ? most_ - 1 : most_));"),
]
