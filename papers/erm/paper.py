"""The numbers of Tables 3 to 6 of Stoyanov, Ropson & Eisner (2011): losses less those of the true models."""

from __future__ import annotations

# Test setting: the true model's loss, and for each train setting its difference, and wins-ties-losses.
TABLE_3: dict[str, tuple[float, dict[str, tuple[float, str]]]] = {
    "frac-MSE": (
        0.04610,
        {"APPR-LOGL": (0.00710, ""), "frac-MSE": (0.00482, "5-0-7"), "frac-MSE-in": (0.00057, "12-0-0")},
    ),
    "int-F": (
        0.06425,
        {
            "APPR-LOGL": (0.01170, ""),
            "int-F-hyb": (0.00411, "7-0-5"),
            "int-F-in": (0.00115, "10-1-1"),
            "int-F-hyb-in": (0.00081, "11-0-1"),
        },
    ),
    "int-L1": (
        0.06385,
        {
            "APPR-LOGL": (0.00751, ""),
            "int-L1-hyb": (0.00398, "5-1-6"),
            "int-L1-in": (0.00137, "10-2-0"),
            "int-L1-hyb-in": (0.00079, "10-2-0"),
        },
    ),
}
# Test setting, train setting: with 10, 20, 30 and 40 % of the edges exchanged.
TABLE_4: dict[str, dict[str, tuple[float, ...]]] = {
    "frac-MSE": {
        "APPR-LOGL": (0.00352, 0.00642, 0.00622, 0.01118),
        "frac-MSE": (0.00101, 0.00316, 0.00312, 0.00534),
    },
    "int-F": {
        "APPR-LOGL": (0.01042, 0.01928, 0.01026, 0.02123),
        "int-F": (0.00095, 0.00472, 0.00473, 0.00969),
    },
    "int-L1": {
        "APPR-LOGL": (0.00452, 0.00748, 0.00569, 0.01173),
        "int-L1": (0.00147, 0.00442, 0.00602, 0.00945),
    },
    "APPR-LOGL": {"APPR-LOGL": (-0.3096, -0.0180, -0.0373, -0.1169)},
}
# With 100, 30, 20 and 10 iterations of BP.
TABLE_5: dict[str, dict[str, tuple[float, ...]]] = {
    "frac-MSE": {
        "APPR-LOGL": (0.00710, 0.00301, 0.00816, 0.02461),
        "frac-MSE": (0.00057, 0.00072, 0.00063, 0.00064),
    },
    "int-F": {
        "APPR-LOGL": (0.01170, 0.00476, 0.01276, 0.03085),
        "int-F": (0.00081, 0.00126, 0.00058, 0.00091),
    },
    "int-L1": {
        "APPR-LOGL": (0.00751, 0.00344, 0.01087, 0.02984),
        "int-L1": (0.00079, 0.00101, 0.00078, 0.00096),
    },
    "APPR-LOGL": {"APPR-LOGL": (-0.3161, -0.1823, -0.2422, -0.1104)},
}
# Test setting: trained for frac-MSE, int-F, int-L1 and APPR-LOGL.
TABLE_6: dict[str, tuple[float, ...]] = {
    "frac-MSE": (0.00057, 0.00122, 0.00115, 0.0071),
    "int-F": (0.00109, 0.00081, 0.00106, 0.0117),
    "int-L1": (0.00069, 0.00096, 0.00079, 0.00751),
    "APPR-LOGL": (0.11141, 0.16153, 0.1508, -0.31618),
}
