// Replays recorded calls.
#include "replay.h"

extern "C" void kvloom_replay(const Word* list) {
    while (list->operation) list = list->operation(list + 1);
}
