/* What the end of a group asks of its windows. */
#ifndef MPP_WINDOWS_H
#define MPP_WINDOWS_H

#include "engine/engine.h"

/* Whether a window is open yet, or a message under way; else nothing comes any more. */
int mpp_windows_end(mpp_group *group);

#endif
